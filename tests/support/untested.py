"""Lists, at the end of a test run, the tests that were skipped because a command is missing."""

import shutil
from collections import defaultdict
from collections.abc import Generator

import pytest

MISSING = "not installed: "
COMMANDS = {"chromium": ("chromium", "chromium-browser")}  # commands with several names
# Commands that scripts/system.sh installs.
FROM_SYSTEM_SH = (
    *("catatonit", "chromium", "curl", "debootstrap", "ip", "podman", "prometheus", "promtool"),
    *("rsync", "ssh", "sshd"),
)


def find(name: str) -> str | None:
    """Return the path of a command; None if it is not installed."""
    return next(filter(None, map(shutil.which, COMMANDS.get(name, (name,)))), None)


def obstacle(*commands: str) -> str | None:
    """Return why a test that needs these commands is skipped; None if it can run."""
    missing = [command for command in commands if find(command) is None]
    return MISSING + ", ".join(missing) if missing else None


def needs(*commands: str) -> pytest.MarkDecorator:
    """Return the mark of a test that needs these commands."""
    reason = obstacle(*commands)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Print the list after pytest's own summary."""
    yield
    if lines := untested(terminalreporter.stats.get("skipped", [])):
        terminalreporter.section("not tested here", yellow=True)
        for line in lines:
            terminalreporter.write_line(line)
        terminalreporter.write_line(
            f"`make system` installs {', '.join(FROM_SYSTEM_SH)} on Debian and Ubuntu"
        )


def untested(skipped: list[pytest.TestReport]) -> list[str]:
    """Return the lines of the list: each reason, followed by its tests."""
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
