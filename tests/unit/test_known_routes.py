"""A wrong path or method is refused before a key is asked for, with what is right."""

import asyncio
from collections.abc import AsyncIterator

import httpx2
import pytest
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

from kvroute.router.middleware.caller_check import CallerCheck
from kvroute.router.middleware.known_routes import KnownRoutes
from tests.support.gates import ClosedGate


async def endless() -> AsyncIterator[bytes]:
    yield b"data: 1\n\n"
    await asyncio.Future()


def client(*, is_open: bool = True) -> httpx2.AsyncClient:
    http = FastAPI()

    @http.get("/v1/cluster")
    async def cluster() -> Response:
        return Response("a body", headers={"x-found": "1"})

    @http.get("/v1/cluster/live")
    async def live() -> Response:
        return StreamingResponse(endless(), media_type="text/event-stream")

    @http.get("/v1/files")
    async def files() -> Response:
        return Response("all files")

    @http.get("/v1/files/{name:path}")
    @http.delete("/v1/files/{name:path}")
    async def file(name: str) -> Response:
        return Response(name)

    @http.post("/v1/chat/completions")
    async def chat() -> Response:
        return Response("answer")

    if not is_open:
        http.add_middleware(CallerCheck, gate=ClosedGate(), refused=lambda _: None)
    http.add_middleware(KnownRoutes, routes=http.routes)
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(http), base_url="http://kvroute")


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/v1/chat/completions//"])
async def test_a_slash_at_the_end_is_ignored(path: str) -> None:
    async with client() as http:
        answer = await http.post(path, json={})
        listed = await http.get("/v1/files/")
    assert (answer.status_code, answer.text) == (200, "answer")
    assert listed.text == "all files", "the path of a longer route takes an empty name, too"


@pytest.mark.parametrize("path", ["/v1/cluster", "/v1/cluster/live", "/v1/files/a"])
async def test_head_has_the_head_of_get_and_no_body(path: str) -> None:
    async with client() as http:
        answer = await http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers.get("x-found", "1") == "1"


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("POST", "/v1/unknown", 404, "there is no route /v1/unknown. GET /docs"),
        ("GET", "/v1/sleep/", 404, "there is no route /v1/sleep/. GET /docs"),
        ("POST", "/sleep", 404, "kvroute does not have vLLM's route /sleep: it concerns"),
        ("PUT", "/v1/files/a", 405, "has no method PUT; use DELETE, GET, HEAD"),
        ("GET", "/v1/chat/completions", 405, "has no method GET; use POST"),
    ],
)
@pytest.mark.parametrize("is_open", [True, False])
async def test_what_no_route_takes_is_refused_with_what_is_right(
    method: str, path: str, status: int, words: str, *, is_open: bool
) -> None:
    async with client(is_open=is_open) as http:
        answer = await http.request(method, path)
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True)
    if status == 405:
        assert answer.headers["allow"] == words.partition("use ")[2]


async def test_a_known_route_asks_the_gate() -> None:
    async with client(is_open=False) as http:
        assert (await http.post("/v1/chat/completions/", json={})).status_code == 401
