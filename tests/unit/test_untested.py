"""A test run lists what it did not test."""

import pytest

from tests.support.untested import MISSING, needs, obstacle, untested


def skipped(nodeid: str, reason: str) -> pytest.TestReport:
    where = (f"{nodeid}.py", 1, f"Skipped: {reason}")
    return pytest.TestReport(nodeid, ("", 0, ""), {}, "skipped", where, "setup")


def test_a_test_that_lacks_a_command_is_listed_under_it() -> None:
    reports = [skipped(name, f"{MISSING}kubectl") for name in ("b", "a")]
    assert untested(reports) == [f"{MISSING}kubectl (2 tests)", "    b", "    a"]


def test_a_test_that_does_not_apply_is_not_listed() -> None:
    assert untested([skipped("a", "it reads no weights")]) == []


def test_what_is_installed_is_no_obstacle() -> None:
    assert obstacle("sh", "no-such-command") == f"{MISSING}no-such-command"
    assert obstacle("sh") is None
    assert not needs("sh").args[0]
