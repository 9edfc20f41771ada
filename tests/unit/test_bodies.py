"""Bodies are read and parsed without delaying other requests."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

import psutil
import pytest
from starlette.requests import Request

from kvroute.router.api import bodies as bodies_module
from kvroute.router.api.bodies import HELD_LIMITS, INLINE_BYTES, Bodies
from kvroute.router.api.calls import COMPLETIONS, parse_call
from kvroute.router.api.errors import ApiError, shown

LARGE = "word " * INLINE_BYTES
PARSE = partial(parse_call, COMPLETIONS)


@pytest.fixture
async def bodies() -> AsyncIterator[Bodies]:
    bodies = Bodies(limit_mb=4)
    yield bodies
    await bodies.close()


def request(*parts: bytes, ends: bool = True) -> Request:
    """Return a request whose body comes in these parts; without `ends`, its client then leaves."""
    messages: list[dict[str, Any]]
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if ends:
        messages[-1]["more_body"] = False
    messages.append({"type": "http.disconnect"})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


async def refusal(bodies: Bodies, request: Request) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await bodies.read(PARSE, request)
    return refused.value


@pytest.mark.parametrize("prompt", ["hi", LARGE, [1, 2], [*range(100_000)]], ids=len)
async def test_small_and_large_bodies_are_parsed_to_the_same_call(
    bodies: Bodies, prompt: Any
) -> None:
    raw = body(prompt=prompt, n=2)
    parsed = await bodies.read(PARSE, request(raw[:50], raw[50:]))
    (found,) = parsed.prompts() or []
    assert (found if isinstance(found, str) else found.tolist(), parsed.n) == (prompt, 2)


async def test_only_large_bodies_are_parsed_in_a_process_and_they_share_it(bodies: Bodies) -> None:
    before = children()
    await bodies.read(PARSE, request(body(prompt="hi")))
    assert children() == before
    for _ in range(3):
        chat = [{"role": "user", "content": LARGE}]
        parsed = await bodies.read(PARSE, request(body(messages=chat)))
        assert parsed.body["messages"] == chat
        assert len(children() - before) == 1
    await bodies.close()
    assert children() == before


@pytest.mark.parametrize("filling", ["", LARGE], ids=["small", "large"])
async def test_invalid_small_and_large_bodies_get_the_same_error(
    bodies: Bodies, filling: str
) -> None:
    bad = await refusal(bodies, request(body(cache_salt="x" * 300, prompt=f"a{filling}")))
    assert (bad.status, bad.param, len(bad.message) < 200) == (400, "cache_salt", True)
    cut = await refusal(bodies, request(body(prompt=f"a{filling}")[:-2]))
    assert (cut.status, cut.code) == (400, "invalid_json")


async def test_a_body_that_kills_the_process_is_refused_and_the_next_one_is_parsed(
    bodies: Bodies,
) -> None:
    with pytest.raises(ApiError, match="takes too much memory"):
        await bodies._process.run(exec, bytearray(b"import os; os._exit(1)"))
    assert (await bodies.read(PARSE, request(body(prompt=LARGE)))).n == 1


async def test_a_body_of_a_million_lists_takes_no_memory_in_the_router(bodies: Bodies) -> None:
    lists = request(b'{"prompt": [' + b"[]," * 1_300_000 + b"[]]}")
    before = psutil.Process().memory_full_info().uss
    assert (await refusal(bodies, lists)).code == "request_too_large"
    assert psutil.Process().memory_full_info().uss - before < 20e6


async def test_a_body_above_the_limit_is_read_to_its_end_and_refused(bodies: Bodies) -> None:
    parts: Iterable[bytes] = [b" " * (1 << 20)] * 5
    refused = await refusal(bodies, request(*parts))
    assert (refused.status, refused.code) == (413, "request_too_large")
    assert str(5 << 20) in refused.message
    assert not bodies._held


async def test_a_client_that_leaves_before_the_end_of_its_body_gets_status_499(
    bodies: Bodies,
) -> None:
    left = await refusal(bodies, request(b'{"prompt"', ends=False))
    assert (left.status, left.code) == (499, "client_left")
    assert not bodies._held


async def test_a_body_that_stops_is_refused_after_a_timeout(
    bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies_module, "SILENCE_S", 0.01)

    async def receive() -> dict[str, Any]:
        return await asyncio.Future()

    silent = Request({"type": "http", "method": "POST", "headers": []}, receive)
    refused = await refusal(bodies, silent)
    assert (refused.status, refused.code) == (408, "request_timeout")


async def test_the_memory_of_unparsed_bodies_is_limited(bodies: Bodies) -> None:
    go_on = asyncio.Event()

    def waiting() -> Request:
        parts = [b" " * (3 << 20)]

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": True}
            await go_on.wait()
            return {"type": "http.disconnect"}

        return Request({"type": "http", "method": "POST", "headers": []}, receive)

    reading = [asyncio.create_task(refusal(bodies, waiting())) for _ in range(25)]
    await asyncio.sleep(0.1)
    assert bodies._held <= HELD_LIMITS * (4 << 20)
    refused = {(task.result().status, task.result().code) for task in reading if task.done()}
    assert refused == {(429, "overloaded")}
    go_on.set()
    await asyncio.gather(*reading)
    assert not bodies._held


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x" * 10**7, '"' + "x" * 79 + "…"),
        ([1] * 10**7, "[" + "1, " * 26 + "1…"),
        ({"a": [None, True, "ü"]}, '{"a": [null, true, "ü"]}'),
    ],
    ids=["string", "list", "object"],
)
def test_a_message_quotes_the_beginning_of_a_value(value: object, text: str) -> None:
    assert shown(value) == text
