"""A request has one id in all logs and traces; an unsuitable id is replaced."""

from typing import Any

import pytest
from starlette.requests import Request

from kvroute.contract.generation import client_id, dispatch_id
from kvroute.router.middleware.request_id import ValidIds, request_id


async def seen_behind(*ids: bytes) -> list[bytes]:
    """Return the ids that remain in a request's headers."""
    seen: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (b"accept", b"*/*") in scope["headers"]
        seen.extend(value for name, value in scope["headers"] if name == b"x-request-id")

    headers = [(b"accept", b"*/*"), *((b"x-request-id", id_) for id_ in ids)]
    scope = {"type": "http", "headers": headers}
    await ValidIds(app)(scope, None, None)  # type: ignore[arg-type]  # it uses neither
    return seen


@pytest.mark.parametrize("good", [b"a", b"req_0:1/2", b"~" * 128])
async def test_a_good_id_is_kept(good: bytes) -> None:
    assert await seen_behind(good) == [good]


@pytest.mark.parametrize("bad", [b"", b"a b", b"a\tb", b"a" * 129, b"\xe9", "é".encode()])
async def test_an_id_that_is_unsuitable_for_logs_is_removed(bad: bytes) -> None:
    assert await seen_behind(bad) == []


async def test_two_ids_are_both_removed() -> None:
    assert await seen_behind(b"one", b"two") == []


def test_a_request_without_an_id_gets_one() -> None:
    bare = Request({"type": "http", "headers": []})
    assert request_id(bare) != request_id(bare) != ""


def test_the_same_id_twice_makes_two_dispatches() -> None:
    first, second = dispatch_id("abc"), dispatch_id("abc")
    assert {client_id(first), client_id(second)} == {"abc"}
    assert first != second
    assert first.startswith("abc-")
