"""The routes of recordings: a form passes to the model that it names, and is kept until the end."""

from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from kvroute.features.audio import ROUTES, Audio, audio_routes
from kvroute.features.audio.recordings import Recording, Recordings
from kvroute.features.gate import OPEN
from kvroute.features.router_service import RouterServices
from kvroute.router.api.bodies import Bodies
from kvroute.router.api.calls import Call
from kvroute.router.api.errors import ApiError, response
from kvroute.router.middleware.caller_check import roles_for
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.serving.models import Models
from tests.support.routes import routes as route_list
from tests.support.tiny_audio import form, sound
from tests.support.without_features import WithoutFeatures

LIMIT_MB = 1


class Model(WithoutFeatures):
    """Streams the form that it gets back to the client."""

    def __init__(self) -> None:
        self.name = "whisper"
        self.settings = SimpleNamespace(adapters=[], max_wait_s=30.0, keep_alive_s=0.0)
        self.asked: list[tuple[Call, Recording]] = []
        self.requests = self
        self.errors: list[Exception] = []
        self.telemetry = SimpleNamespace(refused=self.errors.append)

    def variant(self, name: str | None, tenant: str = "") -> str | None:
        return "" if name in (None, self.name) else None

    async def answer(self, call: Call, context: RequestContext, generate: partial[Any]) -> Response:
        (recording,) = generate.args
        self.asked.append((call, recording))
        return StreamingResponse(recording.parts())


class Routes:
    def __init__(self) -> None:
        self.model = Model()
        models: Any = object.__new__(Models)
        models.all, models.first, models.router_id = [self.model], self.model, "r"
        models._started = 0
        models.cards = lambda *_: [{"id": self.model.name}]
        http = FastAPI()
        http.state.models, http.state.bodies = models, Bodies(limit_mb=1)
        self.recordings = Recordings(limit_mb=LIMIT_MB)
        http.state.services = RouterServices([self.recordings])
        http.state.gate = OPEN
        http.include_router(audio_routes.routes)
        http.exception_handler(ApiError)(_refuse)
        self.http = http

    async def posted(
        self, fields: dict[str, str], file: bytes | None, path: str = ROUTES[0]
    ) -> httpx.Response:
        body, content_type = form(fields, file)
        transport = httpx.ASGITransport(self.http)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            headers = {"content-type": content_type}
            return await client.post(path, content=body, headers=headers)


async def _refuse(request: Request, error: ApiError) -> Response:
    return response(error, path=request.url.path)


@pytest.fixture
async def routes() -> AsyncIterator[Routes]:
    routes = Routes()
    yield routes
    await routes.http.state.bodies.close()


@pytest.mark.parametrize("path", ROUTES)
async def test_a_form_passes_byte_for_byte_and_is_deleted_after_the_answer(
    routes: Routes, path: str
) -> None:
    before = psutil.Process().num_fds()
    answer = await routes.posted({"model": "whisper", "prompt": "a “cat”"}, sound(), path)
    ((call, recording),) = routes.model.asked
    body = form({"model": "whisper", "prompt": "a “cat”"}, sound())[0]
    assert answer.content.split(boundary_of(answer.content)) == body.split(boundary_of(body))
    assert len(answer.content) == recording.upload.size
    assert (call.path, call.raw, call.model) == (path, b"", "whisper")
    assert psutil.Process().num_fds() <= before
    assert routes.recordings._held == 0


def boundary_of(body: bytes) -> bytes:
    return body.partition(b"\r\n")[0]


async def test_only_known_fields_reach_the_router(routes: Routes) -> None:
    """A field such as `background` has a meaning in other bodies only."""
    fields = {"background": "true", "priority": "1", "timeout": "x", "user": "me"}
    assert (await routes.posted(fields, sound())).status_code == 200
    assert routes.model.asked[0][0].body == {"user": "me"}


async def test_an_unknown_model_is_a_404_and_leaves_no_file(routes: Routes) -> None:
    answer = await routes.posted({"model": "other"}, sound())
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert routes.recordings._held == 0
    assert len(routes.model.errors) == 1


async def test_a_recording_above_the_limit_is_a_413(routes: Routes) -> None:
    answer = await routes.posted({"model": "whisper"}, bytes((LIMIT_MB << 20) + 1))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (413, "file", "request_too_large")
    assert "--max-audio-mb" in error["message"]
    assert routes.model.asked == []


async def test_a_form_without_a_file_is_a_400(routes: Routes) -> None:
    answer = await routes.posted({"model": "whisper"}, None)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")


def test_clients_need_the_role_use() -> None:
    assert {roles_for(method, path) for method, path in route_list(Audio().routes())} == {("use",)}
