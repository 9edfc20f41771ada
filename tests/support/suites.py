"""Suites of tests that others wrote: they run against kvroute and against vLLM's own server.

The model of both servers says nothing sensible, so a test of what a model says fails on both. A
test that passes on vLLM's server and fails on kvroute needs a reason, which docs/api.md has too.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PLUGINS = Path(__file__).parents[1] / "slow/suites"  # the folder of our plugins for pytest
TEST_TIMEOUT_S = 60  # for each test of a suite
SUITE_TIMEOUT_S = 900  # for all of them on one server

Outcomes = Mapping[str, str]  # a test's name to why it failed or was skipped; empty if it passed


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The addresses of the two servers that a suite compares."""

    kvroute: str
    stock: str


def run_pytest(
    modules: Sequence[str],
    *options: str,
    folder: Path,
    env: Mapping[str, str],
    python: str | Path = sys.executable,
) -> Outcomes:
    """Run modules of tests below a folder in a process of their own."""
    report = folder / "report.xml"
    done = subprocess.run(
        [
            *(str(python), "-m", "pytest", "--rootdir", ".", "-c", os.devnull),
            *("-p", "no:cacheprovider", "-p", "no:langsmith_plugin", "-q", "-W", "ignore"),
            *("--tb", "line", "--timeout", str(TEST_TIMEOUT_S), "--junitxml", str(report)),
            *(*options, *modules),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{PLUGINS}{os.pathsep}{folder}", **env},
        capture_output=True,
        text=True,
        timeout=SUITE_TIMEOUT_S,
    )
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-4000:]
    return {_name(case): _failure(case) for case in ET.parse(report).iter("testcase")}


def compare(
    kvroute: Outcomes, stock: Outcomes, *, reasons: Mapping[str, str], least_passed: int
) -> None:
    """Fail for each test that only kvroute fails, and when too few pass on kvroute.

    reasons: beginnings of the names of tests that kvroute may fail, each with what docs/api.md
    calls the difference. One that is needed no longer is a failure too.
    """
    passed, expected = _passed(kvroute), _passed(stock)
    print(f"passed of {len(stock)}: kvroute {len(passed)}, vLLM's server {len(expected)}")
    worse = expected - passed
    unexplained = sorted(name for name in worse if not name.startswith((*reasons,)))
    assert not unexplained, {name: kvroute.get(name, "was not run") for name in unexplained}
    needless = [reason for reason in reasons if not any(each.startswith(reason) for each in worse)]
    assert not needless, f"kvroute passes these, take their reasons out: {needless}"
    assert len(passed) >= least_passed


def _passed(outcomes: Outcomes) -> set[str]:
    return {name for name, failure in outcomes.items() if not failure}


def _name(case: ET.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _failure(case: ET.Element) -> str:
    problems = [each for each in case if each.tag in {"failure", "error", "skipped"}]
    return problems[0].get("message") or problems[0].tag if problems else ""
