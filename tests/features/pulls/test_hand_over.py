"""What becomes of the conversations of a replica that Serve removes."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from kvroute.blocks.chain import EVERYBODY
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.generation import Emit, GenerateRequest, TokenIds
from kvroute.contract.keep import RetentionHint, SessionTurn
from kvroute.contract.records import Load, ReplicaRecord, TierFacts
from kvroute.features.placing_feature import PlacingFeatures
from kvroute.features.pulls.hand_over import HandOver, Outcome
from kvroute.features.pulls.peer_pulls import Exchange, PlannedPulls
from kvroute.features.pulls.recent_prompts import PROMPT_TOKENS, RecentPrompt, RecentPrompts
from kvroute.replica.fabric.pull import (
    Exchanging,
    LinkSpeed,
    Pull,
    PullResult,
    Reason,
    carried,
    carried_in,
)
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.sessions.turns import NO_HINTS, SessionHints
from kvroute.wire.structs import decode_begin
from tests.support.records import record
from tests.support.waiting import until
from tests.support.wired import Wired

BLOCK = 4  # tokens
BLOCKS = 50  # in each prompt
HOST_BLOCKS = 1000
LINK, SLOW_LINK = LinkSpeed(0.001, 1e7), LinkSpeed(0.001, 1e3)
NO_PULLS = LinkSpeed(0.0, 0.0)


def peer(replica_id: str, *, blocks: int = HOST_BLOCKS, link: LinkSpeed = LINK) -> ReplicaRecord:
    tier = TierFacts(blocks=blocks, block_bytes=1000, bytes_per_s=1e7)
    exchanging = Exchanging("f", f"{replica_id}:1", *link)
    load = Load(features=carried(exchanging))
    return structs.replace(record(replica_id, host=tier), load=load)


class Shrinking:
    """A fleet of replicas, of which "a" is removed, and a router's hand-over."""

    def __init__(self, *records: ReplicaRecord, within_s: float = 30.0) -> None:
        pulls = PlannedPulls()
        self.fleet = Fleet(
            model="m",
            revision="",
            block_size=BLOCK,
            rng=random.Random(0),
            features=PlacingFeatures([pulls]),
        )
        for each in records:
            self.fleet.mirror.join(each.id)
        self.fleet.update(records)
        self.pulled: list[tuple[TokenIds, str]] = []  # prompt, and the peer that has its blocks
        self.reasons: list[Reason] = []  # why the next pulls copy nothing
        ids = [each.id for each in records]
        self.wired = Wired(dict.fromkeys(ids, self._never))
        self.receivers = Counter[str]()
        for id_, server in self.wired.servers.items():
            server.methods = {"pull": partial(self._pull, id_)}
        self.hand_over = HandOver(
            self.fleet, pulls, self.wired.links, self.wired.links.connected, within_s=within_s
        )

    async def _never(self, request: GenerateRequest, emit: Emit) -> None:
        await asyncio.Future()

    async def _pull(self, replica_id: str, body: bytes, rank: int) -> bytes:
        _, request = decode_begin(body)
        self.receivers[replica_id] += 1
        pull = carried_in(request.features, Pull)
        assert pull is not None
        self.pulled.append((request.token_ids, pull.replica_id))
        if reason := self.reasons.pop(0) if self.reasons else "":
            return msgspec.msgpack.encode(PullResult(0, 0, 0.1, reason))
        return msgspec.msgpack.encode(PullResult(pull.tokens, 1000, 0.1))

    def answer(self, seed: int, *, before: Sequence[int] = (), hints: Any = NO_HINTS) -> TokenIds:
        """Let "a" answer a prompt that begins with these tokens."""
        new = np.random.default_rng(seed).integers(0, 1000, BLOCKS * BLOCK + 1)
        ids = np.append(before, new).astype(np.uint32)
        chain = self.fleet.caches.chain(ids)
        turn, _ = self.fleet.turns.find(chain, len(before) // BLOCK, hints)
        self.fleet.turns.begin(turn)
        generation: Any = SimpleNamespace(
            token_ids=ids, scope=EVERYBODY, sent=RequestContext(turn=turn), replica_id="a"
        )
        self.hand_over.remember(generation)
        return ids

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.wired, asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.hand_over.run())
            await asyncio.sleep(0)
            yield
            task.cancel()

    async def remove(self) -> None:
        """Remove "a", and wait until the router has closed its connection."""
        self.wired.drop("a")
        await until(lambda: not self.wired.servers["a"].peers)

    def count(self, outcome: Outcome) -> int:
        return self.hand_over.outcomes[outcome]

    def hold(self, replica_id: str, ids: TokenIds) -> None:
        """Let a replica have the prompt's blocks in GPU memory."""
        self.fleet.mirror.add(replica_id, self.fleet.caches.chain(ids))


def same(ids: TokenIds, others: TokenIds) -> bool:
    return np.array_equal(ids[: len(others)], others)


async def test_the_latest_conversations_are_pulled_first() -> None:
    fleet = Shrinking(*map(peer, "abc"))
    async with fleet.running():
        prompts = [fleet.answer(seed) for seed in range(8)]
        await fleet.remove()
    assert [source for _, source in fleet.pulled] == ["a"] * 8
    first = [pulled for pulled, _ in fleet.pulled[:4]]
    assert all(any(same(ids, pulled) for pulled in first) for ids in prompts[-4:])
    assert fleet.count("moved") == 8
    assert fleet.hand_over.tokens == 8 * BLOCKS * BLOCK


async def test_only_the_latest_turn_of_a_conversation_is_pulled() -> None:
    fleet = Shrinking(*map(peer, "ab"))
    async with fleet.running():
        first = fleet.answer(1)
        fleet.hold("a", first)
        second = fleet.answer(2, before=first.tolist())
        await fleet.remove()
    (pulled,) = [ids for ids, _ in fleet.pulled]
    assert same(second, pulled)
    assert len(pulled) > len(first)


async def test_all_remaining_replicas_pull_the_same_number_of_blocks() -> None:
    fleet = Shrinking(*map(peer, "abc"))
    async with fleet.running():
        for seed in range(8):
            fleet.answer(seed)
        await fleet.remove()
    assert fleet.receivers == {"b": 4, "c": 4}


async def test_what_another_replica_has_is_not_pulled() -> None:
    fleet = Shrinking(*map(peer, "abc"))
    async with fleet.running():
        fleet.hold("c", fleet.answer(1))
        await fleet.remove()
    assert not fleet.pulled
    assert fleet.count("held") == 1


async def test_a_conversation_that_the_client_has_ended_is_not_pulled() -> None:
    fleet = Shrinking(*map(peer, "ab"))
    async with fleet.running():
        fleet.answer(1, hints=SessionHints(session=7, is_end=True))
        await fleet.remove()
    assert not fleet.pulled


async def test_nothing_is_pulled_over_a_link_that_is_slower_than_computing() -> None:
    fleet = Shrinking(peer("a"), peer("b", link=SLOW_LINK))
    async with fleet.running():
        fleet.answer(1)
        await fleet.remove()
    assert not fleet.pulled
    assert fleet.count("dropped") == 1


async def test_nothing_is_pulled_without_pulls() -> None:
    fleet = Shrinking(peer("a"), peer("b", link=NO_PULLS))
    async with fleet.running():
        fleet.answer(1)
        await fleet.remove()
    assert not fleet.pulled


@pytest.mark.parametrize("records", [[peer("a")], [peer("a"), record("b")]])
async def test_a_replica_that_nobody_can_pull_from_is_left_at_once(
    records: list[ReplicaRecord],
) -> None:
    fleet = Shrinking(*records)
    async with fleet.running():
        fleet.answer(1)
        await fleet.remove()
    assert not fleet.pulled


async def test_half_of_the_blocks_are_moved_to_one_equal_replica() -> None:
    blocks = 4 * BLOCKS
    fleet = Shrinking(*(peer(id_, blocks=blocks) for id_ in "ab"))
    async with fleet.running():
        for seed in range(4):
            fleet.answer(seed)
        await fleet.remove()
    assert (fleet.count("moved"), fleet.count("dropped")) == (2, 2)


async def test_a_refused_pull_is_tried_again() -> None:
    fleet = Shrinking(*map(peer, "ab"))
    fleet.reasons = ["refused"]
    async with fleet.running():
        fleet.answer(1)
        await fleet.remove()
    assert len(fleet.pulled) == 2
    assert fleet.count("moved") == 1


async def test_blocks_that_were_evicted_are_given_up() -> None:
    fleet = Shrinking(*map(peer, "ab"))
    fleet.reasons = ["gone"]
    async with fleet.running():
        fleet.answer(1)
        await fleet.remove()
    assert len(fleet.pulled) == 1
    assert fleet.count("dropped") == 1


async def test_the_time_of_a_hand_over_is_limited() -> None:
    fleet = Shrinking(*map(peer, "ab"), within_s=0.2)
    fleet.reasons = ["refused"] * 1000
    async with fleet.running():
        fleet.answer(1)
        await fleet.remove()
    assert fleet.count("late") == 1


async def test_a_conversation_that_was_moved_can_be_moved_again() -> None:
    fleet = Shrinking(*map(peer, "ab"))
    async with fleet.running():
        fleet.answer(1)
        await fleet.remove()
        fleet.wired.list("a")
        await until(lambda: "a" in fleet.wired.links.connected())
        fleet.wired.drop("b")
        await until(lambda: not fleet.wired.servers["b"].peers)
    assert [source for _, source in fleet.pulled] == ["a", "b"]


def prompt(end: int, tokens: int = 100, before: int = 0) -> RecentPrompt:
    turn = SessionTurn(Fingerprint(end), 1, 1, Fingerprint(before))
    source = Exchange("f", "a:1", 1, None)
    return RecentPrompt(np.zeros(tokens, np.uint32), EVERYBODY, turn, RetentionHint(), "a", source)


def test_the_oldest_prompts_are_forgotten_first() -> None:
    prompts = RecentPrompts(capacity_tokens=3 * (100 + PROMPT_TOKENS))
    for end in range(1, 6):
        prompts.store(prompt(end))
    assert [each.turn.end for each in prompts.on("a")] == [5, 4, 3]


def test_a_prompt_that_is_too_long_is_not_stored() -> None:
    prompts = RecentPrompts(capacity_tokens=1000)
    prompts.store(prompt(1))
    prompts.store(prompt(2, tokens=1000))
    assert [each.turn.end for each in prompts.on("a")] == [1]


def test_a_later_turn_replaces_the_earlier_one() -> None:
    prompts = RecentPrompts()
    prompts.store(prompt(1))
    prompts.store(prompt(2, before=1))
    assert [each.turn.end for each in prompts.on("a")] == [2]
