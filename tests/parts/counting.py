"""A plugin for pytest that counts the tests of a part by module, with their time and CPU time.

It writes the counts as JSON into the file that the variable COUNTS_FILE names.
"""

import os
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from tests.parts.cpu import ControlGroup, control_group

COUNTS_FILE = "KVROUTE_PART_COUNTS"  # environment variable: path of the file
CPU = "cpu_s"  # property of a report


class Counts(msgspec.Struct):
    """What came of a module's tests."""

    tests: dict[str, str] = {}  # id -> "passed", "failed", or the reason why it was skipped
    wall_s: float = 0.0
    cpu_s: float = 0.0  # includes the processes that the tests started

    def add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Count a report: a test has three, for its setup, its call and its teardown."""
        known = self.tests.get(report.nodeid, "passed")
        if report.failed:
            self.tests[report.nodeid] = "failed"
        elif report.skipped and known == "passed":
            self.tests[report.nodeid] = _reason(report)
        elif isinstance(report, pytest.TestReport):
            self.tests[report.nodeid] = known
        if isinstance(report, pytest.TestReport):
            self.wall_s += report.duration
            self.cpu_s += sum(
                float(str(value)) for key, value in report.user_properties if key == CPU
            )


class Counter:
    """Counts in the process that gets the reports of all others."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._modules: dict[str, Counts] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._add(report)

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self._modules.setdefault(report.nodeid.partition("::")[0], Counts()).add(report)

    def pytest_sessionfinish(self) -> None:
        counted = {module: counts for module, counts in self._modules.items() if counts.tests}
        self._file.write_bytes(msgspec.json.encode(counted))


class Meter:
    """Measures CPU time in a process that runs tests."""

    def __init__(self, group: ControlGroup) -> None:
        self._group, self._so_far_s = group, 0.0

    def pytest_runtestloop(self) -> None:
        self._so_far_s = self._group.cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before_s, self._so_far_s = self._so_far_s, self._group.cpu_s()
        report.user_properties.append((CPU, self._so_far_s - before_s))
        return report


def pytest_configure(config: pytest.Config) -> None:
    """Count in the controlling process, and measure in those that run tests. A hook of pytest."""
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        config.pluginmanager.register(Counter(Path(os.environ[COUNTS_FILE])))
    if (is_worker or not config.getoption("numprocesses", None)) and (group := control_group()):
        group.join()
        config.pluginmanager.register(Meter(group))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason why a test was skipped, or failed as expected."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return "it fails as expected"
