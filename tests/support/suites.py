"""Runs test suites by other projects against kvroute and against vLLM's own server.

The answers of the servers' model make no sense, so a test of an answer's meaning fails on both. If
a test passes on vLLM's server and fails on kvroute, docs/api.md must explain the difference.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PLUGINS = Path(__file__).parents[1] / "slow/suites"  # folder with plugins for pytest
TEST_TIMEOUT_S = 60  # timeout of one test in seconds
SUITE_TIMEOUT_S = 900  # timeout of a suite on one server, in seconds

# Name of a test -> why it failed or was skipped; empty if it passed.
Outcomes = Mapping[str, str]


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
    """Run test modules of a folder in another process; return the outcomes."""
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
    """Fail if a test fails only on kvroute, or if too few tests pass on kvroute.

    Args:
        kvroute: The outcomes on kvroute.
        stock: The outcomes on vLLM's own server.
        reasons: Known differences: beginning of the names of tests that may fail on kvroute -> name
            of the difference in docs/api.md. A reason that is no longer needed is a failure.
        least_passed: The minimum number of tests that must pass on kvroute.
    """
    passed, expected = _passed(kvroute), _passed(stock)
    print(f"passed of {len(stock)}: kvroute {len(passed)}, vLLM's server {len(expected)}")
    worse = expected - passed
    unexplained = sorted(name for name in worse if not name.startswith((*reasons,)))
    assert not unexplained, {name: kvroute.get(name, "was not run") for name in unexplained}
    needless = [reason for reason in reasons if not any(name.startswith(reason) for name in worse)]
    assert not needless, f"kvroute passes these, so remove their reasons: {needless}"
    assert len(passed) >= least_passed


def _passed(outcomes: Outcomes) -> set[str]:
    return {name for name, failure in outcomes.items() if not failure}


def _name(case: ET.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _failure(case: ET.Element) -> str:
    problems = [child for child in case if child.tag in {"failure", "error", "skipped"}]
    return problems[0].get("message") or problems[0].tag if problems else ""
