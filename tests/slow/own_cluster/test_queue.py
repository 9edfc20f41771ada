"""More load than a fleet can serve: who waits, who is refused, and that nothing is lost."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import httpx
import pytest

from tests.support.crowd import crowd
from tests.support.scraping import total
from tests.support.serving import Cluster, start_cluster
from tests.support.waiting import until

COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
QUEUED_S, QUEUED_FOR = "x-kvroute-queued-s", "x-kvroute-queued-for"
SHORT, LONG = 20, 3000  # tokens; a replica computes 2,000 a second
MAX_S = 8
TOKENS = 2  # of an answer
CROWD = 8  # clients with long prompts, which keep the fleet busy

Crowded = Callable[[], AbstractContextManager[list[httpx.Response]]]

numbers = itertools.count(1000)


@pytest.fixture(scope="module")
def queued() -> Iterator[Cluster]:
    """Two slow replicas behind two routers."""
    speed = ("--simulated-prefill-tokens-per-s", "2000", "--simulated-decode-ms", "1")
    options = ("--engine", "simulated", "--replicas", "2", "--routers", "2")
    with start_cluster(*options, "--max-wait-s", f"{MAX_S}", *speed) as cluster:
        yield cluster


@pytest.fixture
async def client(queued: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=queued.url, timeout=120, limits=limits) as client:
        yield client


def completion(tokens: int, **more: Any) -> dict[str, Any]:
    """Of a prompt that nobody has sent before."""
    return {"prompt": [next(numbers)] * tokens, "max_tokens": TOKENS, "ignore_eos": True, **more}


async def completed(
    client: httpx.AsyncClient, tokens: int, headers: dict[str, str] | None = None, **more: Any
) -> httpx.Response:
    return await client.post(COMPLETIONS, json=completion(tokens, **more), headers=headers)


@pytest.fixture
def crowded(queued: Cluster) -> Crowded:
    """The fleet is busy in such a block."""
    url = queued.url + COMPLETIONS
    return partial(crowd, CROWD, lambda: httpx.post(url, json=completion(LONG), timeout=120))


def asked(client: httpx.AsyncClient, *given: Any, **more: Any) -> "asyncio.Task[httpx.Response]":
    return asyncio.create_task(completed(client, *given, **more))


def waiting(queued: Cluster, line: str = "default") -> int:
    """Requests, in both routers."""
    return int(total(queued, "router")[f"kvroute_queue_requests{{{line}}}"])


def sent(queued: Cluster) -> int:
    """Requests that came to a replica and have ended there."""
    told = total(queued, "router")
    return int(sum(n for name, n in told.items() if name.startswith("kvroute_requests_total{")))


async def test_without_load_nobody_waits(client: httpx.AsyncClient) -> None:
    answer = await completed(client, SHORT)
    assert (answer.headers[QUEUED_S], answer.headers[QUEUED_FOR]) == ("0.000", "none")


async def test_under_overload_short_prompts_pass_and_what_would_wait_too_long_is_refused(
    client: httpx.AsyncClient, queued: Cluster
) -> None:
    """Half a minute of work for both replicas comes at once."""
    long = [asked(client, LONG) for _ in range(40)]
    await until(lambda: waiting(queued))
    short = await asyncio.gather(*(completed(client, SHORT) for _ in range(10)))
    assert (await client.get("/health")).status_code == 200
    answers = await asyncio.gather(*long)
    assert {each.status_code for each in short} == {200}
    assert {answer.status_code for answer in answers} == {200, 429}
    served = [answer for answer in answers if answer.status_code == 200]
    assert {each.json()["usage"]["completion_tokens"] for each in served} == {TOKENS}
    longest_s = max(float(each.headers[QUEUED_S]) for each in served)
    assert max(float(each.headers[QUEUED_S]) for each in short) < longest_s <= MAX_S + 1
    for refused in (answer for answer in answers if answer.status_code == 429):
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "wait_too_long")
        assert "--max-wait-s is 8 s" in error["message"]
        assert int(refused.headers["retry-after"]) >= 1


async def test_a_request_has_a_deadline_of_its_own(
    client: httpx.AsyncClient, queued: Cluster, crowded: Crowded
) -> None:
    hurried = {"x-kvroute-deadline-s": "0.01"}
    message = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    with crowded():
        await until(lambda: waiting(queued) >= 2)
        by_header = await completed(client, SHORT, hurried)
        by_body = await completed(client, SHORT, timeout=0.01)
        by_message = await client.post(MESSAGES, json=message, headers=hurried)
    assert [each.status_code for each in (by_header, by_body, by_message)] == [429] * 3
    assert "its deadline is 0.01 s" in by_header.json()["error"]["message"]
    assert by_message.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(
    ("headers", "more", "problem"),
    [
        ({"x-kvroute-priority": "urgent"}, {}, "expected one of interactive, default, batch"),
        ({"x-kvroute-deadline-s": "soon"}, {}, "expected a number of seconds above 0"),
        ({}, {"timeout": -1}, "timeout is -1; expected a number of seconds above 0"),
    ],
)
async def test_a_bad_urgency_is_refused(
    client: httpx.AsyncClient, headers: dict[str, str], more: dict[str, Any], problem: str
) -> None:
    answer = await completed(client, SHORT, headers, **more)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


async def test_requests_of_all_classes_are_answered_in_a_crowd(
    client: httpx.AsyncClient, queued: Cluster, crowded: Crowded
) -> None:
    """Batch requests hardly wait in a router: they give way in the replicas."""
    kinds = ("batch", "default", "interactive")
    with crowded() as others:
        await until(lambda: waiting(queued))
        tasks = [asked(client, 200, {"x-kvroute-priority": kind}) for kind in kinds]
        await asyncio.wait(tasks)
    answers = [task.result() for task in tasks]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {TOKENS}
    assert {other.status_code for other in others} <= {200, 429}


async def test_a_client_that_disconnects_while_waiting_causes_no_work(
    client: httpx.AsyncClient, queued: Cluster, crowded: Crowded
) -> None:
    before, clients, waited = sent(queued), 30, 10
    with crowded() as answers:
        await until(lambda: waiting(queued))
        leaving = [asked(client, LONG, {"x-kvroute-priority": "batch"}) for _ in range(clients)]
        await until(lambda: waiting(queued, "filling") >= waited)
        for task in leaving:
            task.cancel()
        await until(lambda: not waiting(queued, "filling"))
    served = sum(answer.status_code == 200 for answer in answers)
    await until(lambda: sent(queued) - before >= served)
    assert sent(queued) - before <= served + clients - waited
