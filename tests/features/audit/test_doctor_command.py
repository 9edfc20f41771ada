"""`kvroute doctor` sends canaries, and audits the replicas with --audit."""

import pytest
from typer.testing import CliRunner

from kvroute.cli import app
from kvroute.doctor import collect
from kvroute.doctor.checks import Check
from kvroute.features.feature import DoctorRequest


@pytest.mark.parametrize(
    ("options", "names"), [([], ["canary"]), (["--audit"], ["canary", "audit"])]
)
def test_an_audit_is_sent_only_with_its_option(
    options: list[str], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    def collect_checks(url: str, further: list[DoctorRequest], step: object) -> list[Check]:
        sent.extend(request.name for request in further)
        return [Check("cluster", "ok", url)]

    monkeypatch.setattr(collect, "collect_checks", collect_checks)
    ran = CliRunner().invoke(app, ["doctor", "--url", "http://c", *options])
    assert (ran.exit_code, sent) == (0, names)
