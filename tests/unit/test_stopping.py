"""A router that stops refuses new requests, and ends answers that run too long with an error."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvroute.router.api.errors import EVENTS, ApiError
from kvroute.router.middleware.stopping import LastAnswers, RunningAnswers

PIECE = b'data: {"sequence_number": 7}\n\n'
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


class Router:
    """Streams one event and then waits, or waits before it answers."""

    def __init__(self) -> None:
        self.answers = RunningAnswers()
        self.go_on = asyncio.Event()
        self.refusals: list[ApiError] = []
        routes = [Route(path, self._answer, methods=["GET", "POST"]) for path in PATHS]
        routes.append(Route("/slow", self._time_out, methods=["POST"]))
        application = Starlette(routes=routes)
        self.app = LastAnswers(application, answers=self.answers, refused=self.refusals.append)

    async def _answer(self, request: Request) -> Response:
        if request.method == "GET":
            return Response("ok")
        if await request.body() == b"stream":
            return StreamingResponse(self._events(), media_type=EVENTS)
        await self.go_on.wait()
        return Response("whole")

    async def _events(self) -> AsyncIterator[bytes]:
        yield PIECE
        await self.go_on.wait()
        yield b"data: [DONE]\n\n"

    async def _time_out(self, request: Request) -> Response:
        raise TimeoutError("of its own")


@pytest.fixture
async def router() -> Router:
    return Router()


@pytest.fixture
async def client(router: Router) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(router.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


async def begun(
    router: Router, client: httpx.AsyncClient, path: str, content: bytes
) -> asyncio.Task[httpx.Response]:
    """Return a request that the router is answering."""
    task = asyncio.create_task(client.post(path, content=content))
    async with asyncio.timeout(60):
        while not router.answers.count:
            await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    return task


@pytest.mark.parametrize("content", [b"stream", b"whole"])
async def test_running_answers_may_finish_and_new_requests_are_refused(
    router: Router, client: httpx.AsyncClient, content: bytes
) -> None:
    running = await begun(router, client, PATHS[0], content)
    assert router.answers.stop() == 1
    refused = await client.post(PATHS[1])
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["type"] == "overloaded_error"
    assert [error.code for error in router.refusals] == ["stopping"]
    assert (await client.get(PATHS[0])).status_code == 200
    router.go_on.set()
    assert (await running).text.endswith("[DONE]\n\n" if content == b"stream" else "whole")
    assert router.answers.stop() == 0


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/chat/completions", 'data: {"error":{"message":'),
        ("/v1/messages", 'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"'),
        ("/v1/responses", 'event: error\ndata: {"type":"error","code":"stopping"'),
    ],
)
async def test_a_stream_that_is_ended_gets_an_error_in_the_format_of_its_api(
    router: Router, client: httpx.AsyncClient, path: str, end: str
) -> None:
    running = await begun(router, client, path, b"stream")
    router.answers.end()
    answer = await running
    assert answer.status_code == 200
    assert answer.text.startswith(PIECE.decode() + end)
    assert ('"sequence_number":8' in answer.text) == (path == "/v1/responses")
    assert router.answers.count == 0


async def test_an_answer_that_is_ended_before_it_starts_is_an_error_response(
    router: Router, client: httpx.AsyncClient
) -> None:
    running = await begun(router, client, PATHS[0], b"whole")
    router.answers.end()
    answer = await running
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert json.loads(answer.content)["error"]["code"] == "stopping"


async def test_an_applications_own_timeout_is_left_alone(client: httpx.AsyncClient) -> None:
    with pytest.raises(TimeoutError, match="of its own"):
        await client.post("/slow")
