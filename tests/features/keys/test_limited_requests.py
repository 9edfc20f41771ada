"""A client sees its tenant's limits in headers and errors, however its request ends."""

import asyncio
import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

from kvroute.features.keys.key_file import new_file, new_key, write
from kvroute.features.keys.key_gate import KeyGate
from kvroute.features.keys.limit_headers import OverLimitError, duration
from kvroute.features.keys.limits import TenantLimits
from kvroute.router.api.bodies import Bodies
from kvroute.router.api.errors import ApiError, response
from kvroute.router.endpoints import openai_routes
from kvroute.router.middleware.caller_check import CallerCheck
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.serving.models import Models
from tests.support.waiting import until
from tests.support.without_features import WithoutFeatures

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


class Model(WithoutFeatures):
    """A model whose prompts have `tokens` tokens, `new` of them uncached; `then` answers them."""

    def __init__(self) -> None:
        self.name = "m"
        self.settings = SimpleNamespace(adapters=[], max_wait_s=0.0, model="m", keep_alive_s=0.0)
        self.status = SimpleNamespace(max_model_len=100)
        self.requests = self.telemetry = self
        self.tokens, self.new = 100, 100
        self.then: Any = self.done
        self.held = asyncio.Event()
        self.errors: list[Exception] = []

    def variant(self, name: str | None, tenant: str = "") -> str | None:
        return "" if name in (None, "m") else name if name in ("x", "y") else None

    async def answer(self, call: Any, context: RequestContext, *_: Any) -> Response:
        context.entry.add_prompt_tokens(self.tokens, time.monotonic())
        context.entry.admit("p", self.tokens, self.new, time.monotonic())
        response: Response = await self.then()
        return response

    async def done(self) -> Response:
        return Response(b"{}")

    async def hold(self) -> Response:
        await self.held.wait()
        return Response(b"{}")

    async def stream(self) -> Response:
        async def parts() -> Any:
            yield b"data: 1\n\n"
            await self.held.wait()

        return StreamingResponse(parts())

    async def fail(self) -> Response:
        raise ApiError(503, "no replica is ready")

    async def break_(self) -> Response:
        raise RuntimeError("ours")

    def refused(self, error: Exception) -> None:
        self.errors.append(error)


class Served:
    """A router for one tenant with these limits, or without API keys if `limits` is None."""

    def __init__(self, limits: TenantLimits | None) -> None:
        self.model = Model()
        self.key, entry = new_key("acme", ["use"], "")
        tenants = {"acme": limits} if limits else {}
        with TemporaryDirectory() as folder:
            path = Path(folder, "keys.json")
            write(path, msgspec.structs.replace(new_file(), keys=(entry,), tenants=tenants))
            gate = KeyGate(path)
        self.limits = gate.counts
        http = FastAPI()
        models = object.__new__(Models)
        models.all = [self.model]  # type: ignore[list-item]
        models.first = self.model  # type: ignore[assignment]
        models._started = 0
        http.state.models = models
        http.state.bodies = Bodies(limit_mb=1)
        http.state.gate = gate
        http.include_router(openai_routes.routes)

        async def refuse(request: Any, error: Any) -> Response:
            return response(error, path=request.url.path)

        http.exception_handler(ApiError)(refuse)
        http.add_middleware(CallerCheck, gate=gate, refused=lambda _: None)
        self.transport = httpx.ASGITransport(http, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(
            transport=self.transport,
            base_url="http://router",
            headers={"authorization": f"Bearer {self.key}"},
        )

    async def chat(self) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=CHAT)

    @property
    def under_way(self) -> tuple[int, int]:
        return self.limits.in_flight("acme")


async def test_a_response_has_the_rest_of_the_limits() -> None:
    served = Served(TenantLimits(max_requests=4, uncached_tokens_per_minute=6000))
    answer = await served.chat()
    assert answer.status_code == 200
    headers = {name: value for name, value in answer.headers.items() if "ratelimit" in name}
    assert re.fullmatch(r"\d+ms|[01]s", headers.pop("x-ratelimit-reset-tokens"))
    assert 5900 <= int(headers.pop("x-ratelimit-remaining-tokens")) <= 6000
    assert headers == {
        "x-ratelimit-limit-requests": "4",
        "x-ratelimit-remaining-requests": "3",  # this one is still under way
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
    }
    assert served.under_way == (0, 0)


@pytest.mark.parametrize("limits", [None, TenantLimits(max_prefixes=3)])
async def test_a_tenant_without_such_limits_gets_no_headers(limits: TenantLimits | None) -> None:
    answer = await Served(limits).chat()
    assert answer.status_code == 200
    assert not any("ratelimit" in name for name in answer.headers)


async def test_one_request_too_many_is_refused_until_another_has_ended() -> None:
    served = Served(TenantLimits(max_requests=1))
    served.model.then = served.model.hold
    first = asyncio.create_task(served.chat())
    await until(lambda: served.under_way[0] == 1)
    second = await served.chat()
    assert (second.status_code, second.headers["retry-after"]) == (429, "1")
    assert second.headers["x-ratelimit-remaining-requests"] == "0"
    error = second.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "its limit of 1 running requests; try again in 1 s" in error["message"]
    (refused,) = served.model.errors
    assert isinstance(refused, OverLimitError)
    assert (refused.tenant, refused.limit) == ("acme", "requests")
    served.model.held.set()
    assert (await first).status_code == 200
    assert (await served.chat()).status_code == 200


async def test_the_error_at_the_limit_of_a_minute_has_a_time_and_cached_tokens_are_free() -> None:
    served = Served(TenantLimits(uncached_tokens_per_minute=120))
    assert (await served.chat()).status_code == 200
    refused = await served.chat()
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    message = refused.json()["error"]["message"]
    assert "its limit of 120 uncached prompt tokens per minute" in message
    assert "Tokens that a replica has cached do not count" in message
    served.model.new = 1
    assert (await served.chat()).status_code == 200


async def test_the_error_of_a_prompt_above_the_limit_forbids_a_retry() -> None:
    refused = await Served(TenantLimits(max_prompt_tokens=99)).chat()
    assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
    assert "retry-after" not in refused.headers
    assert "this request alone has 100" in refused.json()["error"]["message"]


@pytest.mark.parametrize("then", ["fail", "break_", "done", "stream"])
async def test_a_request_is_no_longer_counted_after_any_kind_of_end(then: str) -> None:
    served = Served(TenantLimits(max_requests=1, max_prompt_tokens=100))
    served.model.then = getattr(served.model, then)
    served.model.held.set()
    for _ in range(3):
        await served.chat()
        assert served.under_way == (0, 0)


async def test_tokens_of_a_failed_request_are_given_back_but_not_when_the_client_left() -> None:
    served = Served(TenantLimits(uncached_tokens_per_minute=10_000))
    served.model.then = served.model.fail
    assert (await served.chat()).status_code == 503
    assert served.limits.headroom("acme", 0.0)["tokens"].left == 10_000
    served.model.then = served.model.hold
    task = asyncio.create_task(served.chat())
    await until(lambda: served.under_way[1] == 100)
    task.cancel()
    await until(lambda: served.under_way == (0, 0))
    assert served.limits.headroom("acme", 0.0)["tokens"].left == 9_900


async def test_a_stream_is_counted_as_running_until_its_end() -> None:
    served = Served(TenantLimits(max_requests=1))
    served.model.then = served.model.stream
    task = asyncio.create_task(served.chat())
    await until(lambda: served.under_way[0] == 1)
    assert (await served.chat()).status_code == 429
    served.model.held.set()
    assert "x-ratelimit-limit-requests" in (await task).headers
    assert served.under_way == (0, 0)


async def test_requests_to_stateless_routes_count_too() -> None:
    served = Served(TenantLimits(max_requests=1))
    served.model.then = served.model.hold
    task = asyncio.create_task(served.chat())
    await until(lambda: served.under_way[0] == 1)
    for path in ("/v1/embeddings", "/tokenize", "/v1/route"):
        assert (await served.http.post(path, json={"input": "x"})).status_code == 429, path
    served.model.held.set()
    await task


async def test_anthropics_clients_get_the_error_in_anthropics_format() -> None:
    served = Served(TenantLimits(max_prompt_tokens=1))
    answer = await served.http.post("/v1/messages", json=CHAT)
    assert answer.status_code == 429
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.headers["x-ratelimit-limit-tokens"] == "1"


async def test_an_adapter_that_a_tenant_may_not_use_does_not_exist_for_it() -> None:
    served = Served(TenantLimits(adapters=("x",)))
    for name, status in (("x", 200), ("m", 200), ("y", 404), ("z", 404)):
        answer = await served.http.post("/v1/chat/completions", json={**CHAT, "model": name})
        assert answer.status_code == status
        if status == 404:
            message = answer.json()["error"]["message"]
            assert message == f"The model '{name}' does not exist; this server has 'm'."
            assert (await served.http.get(f"/v1/models/{name}")).status_code == 404


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.12, "120ms"),
        (1, "1s"),
        (59.2, "1m0s"),
        (360, "6m0s"),
        (3601, "1h0m1s"),
        (0.0001, "1ms"),
    ],
)
def test_times_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text
