"""Reports of pip-audit, and the list of accepted vulnerabilities."""

import pytest

from scripts.licences import LOCKS, locked
from tests.support.advisories import ACCEPTED_FILE, NoServiceError, accepted, read_report

CLEAN = {"name": "ray", "version": "2.60.0", "vulns": []}
BAD = {"name": "httpx", "version": "0.28.1", "vulns": [{"id": "PYSEC-1"}, {"id": "PYSEC-2"}]}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}


def test_vulnerabilities_are_listed_with_their_package() -> None:
    report = {"dependencies": [CLEAN, BAD, UNKNOWN]}
    assert read_report(report) == {"PYSEC-1": "httpx", "PYSEC-2": "httpx"}


def test_a_service_that_knows_no_package_is_not_reached() -> None:
    with pytest.raises(NoServiceError, match="not found on PyPI"):
        read_report({"dependencies": [UNKNOWN]})


def test_an_accepted_vulnerability_needs_a_reason() -> None:
    assert accepted("# comment\n\nPYSEC-1 httpx not used by kvroute\n") == {"PYSEC-1": "httpx"}
    with pytest.raises(ValueError, match="not enough values"):
        accepted("PYSEC-1 httpx\n")


def test_every_accepted_vulnerability_is_of_a_locked_package() -> None:
    names = set().union(*map(locked, LOCKS.glob("*.lock")))
    assert set(accepted(ACCEPTED_FILE.read_text()).values()) <= names
