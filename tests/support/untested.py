"""A test run ends with what it did not test, for want of a command on this computer."""

import shutil
from collections import defaultdict
from collections.abc import Generator

import pytest

MISSING = "not installed: "
COMMANDS = {"chromium": ("chromium", "chromium-browser")}  # where not its own name alone
FROM_SYSTEM_SH = ("chromium", "debootstrap", "prometheus", "promtool")


def find(name: str) -> str | None:
    """The path of a command; None where it is not installed."""
    return next(filter(None, map(shutil.which, COMMANDS.get(name, (name,)))), None)


def obstacle(*commands: str) -> str | None:
    """Why a test that needs all of these is skipped; None where it can run."""
    missing = [command for command in commands if find(command) is None]
    return MISSING + ", ".join(missing) if missing else None


def needs(*commands: str) -> pytest.MarkDecorator:
    """The mark of a test that needs all of these."""
    reason = obstacle(*commands)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Writes the list last, after pytest's own summary."""
    yield
    if lines := untested(terminalreporter.stats.get("skipped", [])):
        terminalreporter.section("not tested here", yellow=True)
        for line in lines:
            terminalreporter.write_line(line)
        terminalreporter.write_line(
            f"`make system` installs {', '.join(FROM_SYSTEM_SH)} on Debian and Ubuntu"
        )


def untested(skipped: list[pytest.TestReport]) -> list[str]:
    """A line for each reason that names a missing command, and its tests, one a line."""
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for report in skipped:
        assert isinstance(report.longrepr, tuple)
        _, _, reason = report.longrepr
        if MISSING in reason:
            tests[reason.removeprefix("Skipped: ")].append(report.nodeid)
    lines = []
    for reason, names in sorted(tests.items()):
        lines += [f"{reason} ({len(names)} tests)", *(f"    {name}" for name in names)]
    return lines
