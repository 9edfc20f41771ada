"""Routers know of each other's requests, and forget those of routers that are gone."""

import asyncio
import time
from functools import partial

import numpy as np
import pytest

from kvroute.contract.messages import RouterMessage, decode
from kvroute.router.connections.peers import (
    ALIVE_S,
    MAX_EVENTS,
    SILENCE_S,
)
from kvroute.store.index import Index
from tests.support.peers import Router, connected, prompt
from tests.support.waiting import until


async def test_a_dispatch_counts_at_the_other_router_until_its_end(redis_url: str) -> None:
    one, other = Router(), Router()
    async with connected(redis_url, one, other):
        attempt = one.send(prompt(7))
        await until(lambda: other.expects(prompt(7)) == {attempt.replica_id})
        assert other.backlogs_s()[attempt.replica_id] == pytest.approx(0.4)
        attempt.first_token(100.4)
        await until(lambda: other.backlogs_s()[attempt.replica_id] == 0.0)
        assert other.expects(prompt(7)) == {attempt.replica_id}
        attempt.end()
        await until(lambda: other.expects_when_told(prompt(7)) == set())


async def test_connected_routers_spread_new_prompts(redis_url: str) -> None:
    one, other = Router(), Router()
    async with connected(redis_url, one, other):
        chosen = []
        for number in range(4):
            sender, hearer = (one, other) if number % 2 else (other, one)
            chosen.append(sender.send(prompt(number), str(number)).replica_id)
            await until(partial(hearer.expects, prompt(number)))
    assert chosen.count("a") == chosen.count("b")


def test_prefill_that_a_replica_reports_beyond_known_requests_counts_as_backlog() -> None:
    router = Router()
    for number in range(100):
        router.send(prompt(number), str(number)).end()
    tokens = len(prompt(0))
    for pending in (0, 0, 3 * tokens):
        router.fleet.loads.report("b", pending)
    assert router.backlogs_s() == {"a": 0.0, "b": pytest.approx(3 * 0.4, rel=0.1)}


async def test_a_sibling_follows_its_leader_through_another_router(redis_url: str) -> None:
    one, other = Router(), Router()
    async with connected(redis_url, one, other):
        leader = one.send(prompt(3), "leader")
        await until(lambda: other.expects(prompt(3)))
        other.now_s += 0.2  # half of the leader's prefill is done: waiting is cheaper
        sibling = other.send(np.concatenate([prompt(3), prompt(4, 20)]), "sibling")
    assert sibling.replica_id == leader.replica_id


async def test_a_router_ignores_its_own_messages(redis_url: str) -> None:
    one = Router()
    async with connected(redis_url, one):
        attempt = one.send(prompt(7))
        await asyncio.sleep(0.2)
        assert one.backlogs_s()[attempt.replica_id] == pytest.approx(0.4)


async def test_a_router_without_others_publishes_heartbeats_only(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = list[RouterMessage]()

    async def publish(index: Index, payload: bytes) -> None:
        published.append(decode(payload))

    monkeypatch.setattr(Index, "publish_to_routers", publish)
    one, began_s = Router(), time.monotonic()
    async with connected(redis_url, one):
        for number in range(50):
            one.send(prompt(7), str(number)).end()
            await asyncio.sleep(0.005)
    assert len(published) < 3 + (time.monotonic() - began_s) / ALIVE_S
    assert sum(len(message.events) for message in published) < 50  # of 100


async def test_a_silent_router_is_forgotten(redis_url: str) -> None:
    one, other = Router(), Router()
    async with connected(redis_url, one, other):
        one.send(prompt(7))
        await until(lambda: other.expects(prompt(7)))
        other.now_s += SILENCE_S + 1
        other.listener.forget_silent()
        assert other.expects(prompt(7)) == set()
        assert set(other.backlogs_s().values()) == {0.0}


async def test_an_end_counts_although_no_other_router_was_known_then(redis_url: str) -> None:
    one, other = Router(), Router()
    async with connected(redis_url, one, other):
        attempt = one.send(prompt(1))
        await until(lambda: max(other.backlogs_s().values()) > 0)
        one.now_s += SILENCE_S + 1  # the other one was stopped for so long
        one.listener.forget_silent()
        attempt.end("ok")
        await until(lambda: max(other.backlogs_s().values()) == 0)


async def test_waiting_events_are_bounded_and_their_loss_is_published() -> None:
    one, other = Router(), Router()
    attempts = [one.send(prompt(7, 8), str(number)) for number in range(MAX_EVENTS + 5)]
    assert len(one.peer_publisher._events) <= MAX_EVENTS
    assert len(attempts) == MAX_EVENTS + 5
    assert type(one.peer_publisher._events[0]).__name__ == "Restarted"
    assert other.expects(prompt(7, 8)) == set()


@pytest.mark.parametrize(("origin", "is_load"), [("", True), ("ray-1", True), ("ray-2", False)])
def test_what_a_router_of_another_ray_cluster_sends_is_no_load_here(
    origin: str, is_load: bool
) -> None:
    """During an upgrade, two Ray clusters have the same id, and each has replicas of its own."""
    sender, receiver = Router(origin), Router("ray-1")
    sender.peer_publisher.blamed(b"digest")
    sender.send(prompt(7))
    receiver.listener.receive(sender.peer_publisher.next_message())
    assert (receiver.expects(prompt(7)) != set()) == is_load
    assert (max(receiver.backlogs_s().values()) > 0) == is_load
    assert receiver.blamed == [b"digest"]
    assert receiver.listener.alive == 1
