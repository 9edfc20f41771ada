"""/v1/route reads the same fields and headers of a request as the generating routes."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kvroute.features.gate import OPEN
from kvroute.router.api.bodies import Bodies
from kvroute.router.api.calls import MESSAGES, Call
from kvroute.router.endpoints import openai_routes
from kvroute.router.serving.models import Models
from tests.support.without_features import WithoutFeatures


class Model(WithoutFeatures):
    """Records the call that it explains."""

    def __init__(self) -> None:
        self.name = "m"
        self.settings = SimpleNamespace(adapters=[])
        self.asked: list[tuple[str, Any]] = []
        self.requests = self

    def variant(self, name: str | None, tenant: str = "") -> str | None:
        return ""

    async def explain(self, call: Call, _: Any) -> list[Any]:
        self.asked.append((call.path, call.headers))
        return []


async def test_the_headers_that_features_read_and_the_body_of_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openai_routes, "HEADERS", ("x-name",))
    model = Model()
    models: Any = object.__new__(Models)
    models.all, models.first, models.router_id, models._started = [model], model, "r", 0
    http = FastAPI()
    http.state.models, http.state.bodies = models, Bodies(limit_mb=1)
    http.state.gate = OPEN
    http.include_router(openai_routes.routes)
    transport = httpx.ASGITransport(http)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        body = {"messages": [], "system": "Be brief.", "max_tokens": 1}
        headers = {b"x-name": "法律".encode(), b"x-other": b"b"}
        answer = await client.post("/v1/route", json=body, headers=headers)
    assert answer.status_code == 200
    assert model.asked == [(MESSAGES, {"x-name": "法律"})]
