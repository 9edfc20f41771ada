"""No locked package has a known vulnerability, except those that are accepted with a reason."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.support.advisories import ACCEPTED_FILE, NoServiceError, accepted, audit
from tests.support.repository import ROOT

LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
pytestmark = pytest.mark.timeout(1800)


def test_no_locked_package_has_an_unknown_vulnerability() -> None:
    found: dict[str, str] = {}
    for lock in LOCKS:
        try:
            found |= audit(lock)
        except NoServiceError as error:
            pytest.skip(f"no advisory service can be reached: {error}")
    known = accepted(ACCEPTED_FILE.read_text())
    unknown = {name: package for name, package in found.items() if name not in known}
    assert not unknown, "update these packages, or accept them in requirements/advisories.txt"
    assert not set(known) - set(found), "these are gone: remove them from advisories.txt"


class Advisories(BaseHTTPRequestHandler):
    """A service in OSV's format that knows one vulnerability, of the package hatchling."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        vulnerability = {"id": "TEST-1", "affected": [], "modified": "2026-01-01T00:00:00Z"}
        is_hatchling = asked["package"]["name"] == "hatchling"
        answer = json.dumps({"vulns": [vulnerability]} if is_hatchling else {}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def advisory_service() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Advisories) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_a_vulnerability_that_a_service_knows_is_found(tmp_path: Path) -> None:
    with advisory_service() as url:
        options = ("--vulnerability-service", "osv", "--osv-url", url)
        found = audit(ROOT / "requirements/build.lock", *options, "--cache-dir", str(tmp_path))
    assert found == {"TEST-1": "hatchling"}


def test_a_service_that_does_not_answer_is_no_clean_report(tmp_path: Path) -> None:
    options = ("--vulnerability-service", "osv", "--osv-url", "http://127.0.0.1:9")
    with pytest.raises(NoServiceError):
        audit(ROOT / "requirements/build.lock", *options, "--cache-dir", str(tmp_path))
