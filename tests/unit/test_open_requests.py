"""Requests above the limit are refused immediately; health checks are answered under any load."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvroute.router.api.errors import ApiError
from kvroute.router.middleware.open_requests import OpenLimit
from tests.support.waiting import until


class Router:
    """Reads the body of a POST, and answers when the test lets it."""

    def __init__(self, limit: int = 2) -> None:
        self.go_on = asyncio.Event()
        self.refusals: list[ApiError] = []
        application = Starlette(routes=[Route("/", self._answer, methods=["GET", "POST"])])
        self.app = OpenLimit(application, limit=limit, refused=self.refusals.append)

    async def _answer(self, request: Request) -> Response:
        if request.method == "POST":
            await request.body()
            await self.go_on.wait()
        return Response("ok")


@pytest.fixture
async def router() -> Router:
    return Router()


@pytest.fixture
async def client(router: Router) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(router.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


async def test_requests_above_the_limit_are_refused(
    router: Router, client: httpx.AsyncClient
) -> None:
    under_way = [asyncio.create_task(client.post("/")) for _ in range(2)]
    await asyncio.sleep(0.05)
    refused = await client.post("/")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    assert [refusal.code for refusal in router.refusals] == ["overloaded"]
    assert (await client.get("/")).status_code == 200
    router.go_on.set()
    assert {answer.status_code for answer in await asyncio.gather(*under_way)} == {200}
    assert (await client.post("/")).status_code == 200


async def test_uploads_leave_most_places_to_other_requests() -> None:
    """Only forms whose bodies have not arrived count as uploads."""
    router = Router(limit=8)
    transport, is_complete = httpx.ASGITransport(router.app), asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        yield b"--x"
        await is_complete.wait()

    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:

        async def upload() -> httpx.Response:
            headers = {"content-type": "multipart/form-data; boundary=x"}
            return await client.post("/", content=slow_body(), headers=headers)

        tasks = [asyncio.create_task(upload()) for _ in range(2)]
        await asyncio.sleep(0.05)
        refused = await upload()
        assert refused.status_code == 429
        assert "2 uploads" in refused.json()["error"]["message"]
        tasks += [asyncio.create_task(client.post("/")) for _ in range(4)]
        is_complete.set()
        await asyncio.sleep(0.05)
        tasks += [asyncio.create_task(upload()) for _ in range(2)]
        await asyncio.sleep(0.05)
        router.go_on.set()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}


async def test_uploads_that_arrive_at_the_same_time_leave_these_places_too() -> None:
    transport, is_complete = httpx.ASGITransport(Router(limit=8).app), asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        yield b"--x"
        await is_complete.wait()

    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        uploads = [
            asyncio.create_task(client.post("/", content=slow_body(), headers=headers))
            for _ in range(6)
        ]
        await until(lambda: sum(upload.done() for upload in uploads) == 4)
        assert {upload.result().status_code for upload in uploads if upload.done()} == {429}
        for upload in uploads:
            upload.cancel()
        await asyncio.wait(uploads)
