"""Each route of vLLM's server is one of kvroute's, or is refused with a reason."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvroute.router.middleware.known_routes import refusal
from kvroute.router.middleware.missing_routes import MISSING
from tests.support.routes import routes

METHODS = "get|post|put|delete|websocket|add_api_route"
ROUTE = re.compile(rf'\w*(?:router|app)\.(?:{METHODS})\(\s*"(/[^"]*)"')
OTHER_SERVERS = ("dp_supervisor.py", "preload.py")  # these files have routes of other processes


def _vllms() -> set[str]:
    """Return the paths of all routes in the sources of vLLM's HTTP server."""
    spec = find_spec("vllm.entrypoints")
    assert spec
    assert spec.origin
    files = Path(spec.origin).parent.rglob("*.py")
    sources = [file.read_text() for file in files if file.name not in OTHER_SERVERS]
    return {path for source in sources for path in ROUTE.findall(source)}


def test_each_route_of_vllm_is_served_or_refused_with_a_reason() -> None:
    ours = {_plain(path) for _, path in routes()}
    theirs = {_plain(path) for path in _vllms()}
    assert len(theirs) > 50
    assert theirs - ours == {*MISSING}


@pytest.mark.parametrize("path", ["/v1/realtime", "/sleep"])
def test_a_client_is_told_why_a_route_is_missing(path: str) -> None:
    answer = refusal("POST", path, frozenset())
    assert answer.status == 404
    assert MISSING[path] in answer.message


def _plain(path: str) -> str:
    """Return a path without the names of its parameters."""
    return re.sub(r"\{[^}]*\}", "{}", path)
