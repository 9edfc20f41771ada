"""Clients cannot control or break Ray Serve with a header."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.serve import _private as serves
from ray.serve._private import constants
from starlette.types import ASGIApp

from kvroute.router.api import sessions
from kvroute.router.middleware import request_id
from kvroute.router.middleware.serve_headers import CONTROL_HEADERS, CONTROL_PREFIX, middlewares
from kvroute.settings.serve_environment import serve_environment

FOLDER = Path(str(serves.__file__)).parent
SERVERS = ("proxy.py", "replica.py", "http_util.py")  # of Serve, that read a request's headers
WRITERS = {  # functions of Serve that mention the headers of responses only
    "convert_object_to_asgi_messages",
    "get_http_response_status",
    "handle_exception",
    "send_http_response_on_exception",
    "send_with_request_id",
}
CHECKED = {request_id.HEADER, sessions.SESSION}  # which reach Serve


async def seen_behind(*headers: tuple[bytes, bytes], kind: str = "http") -> list[Any]:
    """Return those of the headers that Serve receives."""
    seen: list[Any] = []

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])

    app: ASGIApp = serve
    for middleware in middlewares():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    await app({"type": kind, "headers": list(headers)}, None, None)  # type: ignore[arg-type]
    return seen


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    "name",
    [*sorted(CONTROL_HEADERS), b"Serve_Multiplexed_Model_Id", CONTROL_PREFIX + b"kv-token-key"],
)
async def test_serve_does_not_receive_headers_that_control_it(name: bytes, kind: str) -> None:
    kept = (b"x-kvroute-receipt", b"1")
    assert await seen_behind((name, b"1"), kept, kind=kind) == [kept]


@pytest.mark.parametrize(
    ("given", "seen"),
    [(b"a", b"a"), ("café".encode(), "café".encode()), (b"caf\xe9", "café".encode())],
)
async def test_every_value_is_utf8(given: bytes, seen: bytes) -> None:
    assert await seen_behind((b"x-session-id", given)) == [(b"x-session-id", seen)]


def test_serve_runs_this_first() -> None:
    path = f"{middlewares.__module__}:{middlewares.__name__}"
    assert serve_environment()["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == path


def test_serve_knows_no_other_header() -> None:
    """A new version of Serve may obey more headers: read what they do, and list them."""
    names = {each.decode() for each in (*CONTROL_HEADERS, CONTROL_PREFIX)} | CHECKED
    assert {serves_header.lower().replace("_", "-") for serves_header in serves_headers()} == names


def test_serve_reads_headers_nowhere_else() -> None:
    """A new function may obey a header that is not in a constant."""
    functions = {
        readers_of_header
        for name in SERVERS
        for readers_of_header in readers_of_headers(FOLDER / name)
    }
    assert functions - WRITERS == {
        "__call__",  # Serve's own check of x-request-id
        "_direct_ingress_asgi",
        "_parse_request_timeout",
        "get_asgi_tracing_context",  # traceparent and tracestate, which we read too
        "get_grpc_tracing_context",
        "parse_disconnect_disabled_header",
        "parse_request_timeout_header",
        "parse_session_id_header",
        "session_id_from_headers",
        "send_request_to_replica",
        "setup_request_context_and_handle",
    }


def serves_headers() -> Iterator[str]:
    """Yield the headers in Serve's source: x-..., and constants that hold names of headers."""
    for file in FOLDER.rglob("*.py"):
        yield from re.findall(r"""["'](x-[\w-]+)["']""", file.read_text(), re.IGNORECASE)
    source = Path(str(constants.__file__)).read_text()
    constant = re.compile(r"((?:^#.*\n)*)^(\w+)(?:: \w+)? = ", re.MULTILINE)
    for comment, name in constant.findall(source):
        value = getattr(constants, name)
        is_header = "HEADER" in name or "request header" in comment
        if is_header and isinstance(value, str) and not name.endswith("_FIELD"):
            yield value


def readers_of_headers(file: Path) -> Iterator[str]:
    """Yield the names of the functions that mention headers."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, functions) and re.search(r"\bheaders\b", ast.unparse(node)):
            yield node.name
