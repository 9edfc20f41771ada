"""What only a replica had that has left is computed elsewhere, if the price says so."""

import asyncio
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.cache_groups import CacheGroup, Layout
from kvroute.blocks.chain import Scope
from kvroute.contract.generation import GenerateRequest, TokenIds
from kvroute.contract.keep import Keep
from kvroute.router.connections.links import UnansweredError
from kvroute.router.connections.peers import PeerPublisher, PeerSubscriber
from kvroute.router.dispatch.ahead import SLICE_S, slice_end
from kvroute.router.dispatch.handover import MOST_TIME_S, HandOver
from kvroute.router.placement.attempts import (
    Attempt,
    RequestContext,
    RequestObserver,
    RequestObservers,
)
from kvroute.router.placement.fleet import Fleet
from kvroute.router.sessions.recent_prompts import RecentPrompts
from kvroute.router.sessions.returns import NOTHING_SAID, Said
from tests.support.records import FACTS, record

BLOCK = FACTS.block_size
TOKENS = 201  # of a prompt: 50 reusable blocks, 0.2 s of prefill


class Channel(RequestObserver):
    """Tells other routers of one's requests at once."""

    def __init__(self) -> None:
        self._publisher = PeerPublisher()
        self.others: list[PeerSubscriber] = []

    def sent(self, attempt: Attempt) -> None:
        self._publisher.sent(attempt)
        self._deliver()

    def first_token(self, attempt: Attempt) -> None:
        self._publisher.first_token(attempt)
        self._deliver()

    def ended(self, attempt: Attempt) -> None:
        self._publisher.ended(attempt)
        self._deliver()

    def _deliver(self) -> None:
        message = self._publisher.take()
        for other in self.others:
            other.receive(message)


class Router(RequestObserver):
    """One of a fleet of three replicas, which compute at once what they are sent."""

    def __init__(self, layout: Layout | None = None) -> None:
        self.channel = Channel()
        self.others: list[Router] = []
        self.now_s = 100.0
        self.running = ["a", "b", "c"]
        self.is_free = True
        self.is_broken = False
        self.during: Callable[[], object] = lambda: None  # while a replica computes
        self.requests: list[tuple[str, GenerateRequest]] = []
        self.told: list[Attempt] = []
        self.fleet = Fleet(
            model="m", revision="", block_size=BLOCK, rng=random.Random(0), observer=self.channel
        )
        self.fleet.update(
            [record(name, capacity_blocks=10_000, layout=layout) for name in self.running]
        )
        for name in self.running:
            self.fleet.mirror.join(name)
        self.handover = HandOver(
            *(self.fleet, RecentPrompts(), self.send),
            running=lambda: self.running,
            trusted=lambda: [*self.running],
            is_free=lambda: self.is_free,
            drain_s=600.0,
            observer=RequestObservers(self, self.channel),
            clock=lambda: self.now_s,
        )
        self.handover.watch()

    def meet(self, other: "Router") -> None:
        """Both serve the same clients, and hear of each other."""
        for one, another in ((self, other), (other, self)):
            one.others.append(another)
            one.channel.others.append(
                PeerSubscriber(another.fleet, own="", clock=lambda: self.now_s)
            )

    def sent(self, attempt: Attempt) -> None:
        self.told.append(attempt)

    async def send(self, replica_id: str, request: GenerateRequest) -> None:
        self.requests.append((replica_id, request))
        self.during()
        if self.is_broken:
            raise UnansweredError("it is gone")
        for _ in self.others:  # they go on meanwhile
            await asyncio.sleep(0)
        tokens = len(request.token_ids)
        self.now_s += self.fleet.loads.prefill_s(replica_id, tokens, request.expected_tokens)
        self.hold(replica_id, request.token_ids)

    def hold(self, replica_id: str, token_ids: TokenIds) -> None:
        for router in (self, *self.others):
            if replica_id in router.fleet.mirror.replica_ids:
                chain = router.fleet.caches.chain(token_ids)
                router.fleet.mirror.add(replica_id, router.fleet.caches.added(replica_id, chain))

    def chat(self, token_ids: TokenIds, to: str = "a", said: Said = NOTHING_SAID) -> TokenIds:
        """A turn that this replica has answered; its prompt."""
        placement = self.fleet.place(token_ids, self.running, self.now_s)
        retention = self.fleet.retention(placement, self.now_s, said)
        context = RequestContext(self.now_s, retention=retention)
        attempt = self.fleet.sent(placement, to, str(self.now_s), self.now_s, context)
        self.hold(to, token_ids)
        attempt.end("ok")
        self.handover.remember(retention.turn, token_ids, Scope())
        return token_ids

    def crowd(self, replica_id: str, tokens: int = 1000) -> Attempt:
        """A request of a client is there."""
        placement = self.fleet.place(prompt(99, tokens), self.running, self.now_s)
        return self.fleet.sent(placement, replica_id, f"crowd {self.now_s}", self.now_s)

    def leave(self, replica_id: str) -> None:
        self.running.remove(replica_id)
        self.fleet.mirror.drop(replica_id)
        self.handover.watch()

    async def finish(self) -> None:
        while await self.handover.step():
            pass

    def hits(self, token_ids: TokenIds) -> int:
        found = self.fleet.caches.hits(self.fleet.caches.chain(token_ids))
        return max(found.get(name, 0) for name in self.running)

    @property
    def outcomes(self) -> dict[str, int]:
        return {name: count for name, count in self.handover.outcomes.items() if count}

    @property
    def computed(self) -> list[int]:
        """The first token of each prompt, in order."""
        return [*dict.fromkeys(int(request.token_ids[0]) for _, request in self.requests)]

    @property
    def keeps(self) -> list[Keep | None]:
        return [request.keep for _, request in self.requests]


def prompt(number: int, tokens: int = TOKENS) -> TokenIds:
    return np.arange(number * 10_000, number * 10_000 + tokens, dtype=np.uint32)


async def test_a_chat_finds_its_history_though_its_replica_left() -> None:
    router = Router()
    chat = router.chat(prompt(1))
    router.leave("a")
    assert router.hits(chat) == 0
    await router.finish()
    assert (router.hits(chat), router.outcomes) == (50, {"computed": 1})
    assert router.handover.tokens == 50 * BLOCK


async def test_what_others_have_is_not_computed() -> None:
    router = Router()
    router.chat(prompt(1), to="b")
    router.hold("c", router.chat(prompt(2), to="a"))
    router.leave("a")
    await router.finish()
    assert (router.requests, router.outcomes) == ([], {"held": 1})


def two_routers() -> tuple[Router, Router]:
    one, other = Router(), Router()
    one.meet(other)
    return one, other


def leave(*routers: Router) -> None:
    """The same replica, for all of them."""
    for router in routers:
        router.leave("a")


async def test_two_routers_share_what_a_replica_leaves_behind() -> None:
    one, other = two_routers()
    chats = [router.chat(prompt(n)) for n, router in enumerate([one, other] * 3)]
    leave(one, other)
    await asyncio.gather(one.finish(), other.finish())
    assert [one.hits(chat) for chat in chats] == [50] * 6
    assert one.outcomes == other.outcomes == {"computed": 3}


async def test_a_prompt_that_two_routers_have_sent_is_computed_by_one() -> None:
    one, other = two_routers()
    for router in (one, other):
        chat = router.chat(prompt(1))
    leave(one, other)
    await asyncio.gather(one.finish(), other.finish())
    await other.finish()  # it has looked while the other one's replica was busy
    assert (one.hits(chat), one.outcomes, other.outcomes) == (50, {"computed": 1}, {"held": 1})
    assert one.handover.tokens + other.handover.tokens == 50 * BLOCK


async def test_a_chat_that_went_on_through_another_router_is_left_to_that() -> None:
    one, other = two_routers()
    first = one.chat(prompt(1))
    later = other.chat(np.concatenate([first, prompt(2)]))
    leave(one, other)
    await one.finish()
    assert (one.requests, one.outcomes) == ([], {})
    await other.finish()
    assert (other.hits(later), other.outcomes) == (100, {"computed": 1})


async def test_what_was_handed_over_is_handed_on() -> None:
    router = Router()
    chat = router.chat(prompt(1))
    router.leave("a")
    await router.finish()
    router.leave(router.requests[0][0])
    await router.finish()
    assert (router.hits(chat), router.outcomes) == (50, {"computed": 2})


async def test_the_likeliest_comes_first() -> None:
    router = Router()
    for number in (1, 2, 3):
        router.chat(prompt(number))
        router.now_s += 60.0
    router.leave("a")
    await router.finish()
    assert router.computed == [30_000, 20_000, 10_000]


async def test_a_promise_to_come_back_is_as_good_as_a_fresh_turn() -> None:
    router = Router()
    router.chat(prompt(1), said=Said(promise_s=300.0))
    router.now_s += 100.0
    router.chat(prompt(2))
    router.now_s += 10.0
    router.leave("a")
    await router.finish()
    assert router.computed == [10_000, 20_000]
    assert router.keeps[0] is not None
    assert router.keeps[0].still_s == pytest.approx(190.0)


async def test_ended_conversations_are_left_alone() -> None:
    router = Router()
    router.chat(prompt(1), said=Said(is_end=True))
    router.chat(prompt(2), said=Said(session=7))
    router.fleet.returns.end(7)
    router.leave("a")
    await router.finish()
    assert router.requests == []


async def test_a_busy_fleet_computes_nothing_ahead() -> None:
    router = Router()
    chat = router.chat(prompt(1))
    router.running.remove("c")
    other = router.crowd("b")
    router.leave("a")
    assert not await router.handover.step()
    other.end("ok")
    await router.finish()
    assert router.hits(chat) == 50


async def test_a_busy_replica_holds_up_its_own_prompts_only() -> None:
    router = Router()
    first, second = router.chat(prompt(1)), router.chat(prompt(2))
    for chat, home in ((first, "b"), (second, "c")):  # where most of each is, too
        router.fleet.mirror.add(home, router.fleet.caches.chain(chat)[:40])
    router.leave("a")
    other = router.crowd("c", 50)
    await router.finish()
    assert (router.hits(first), router.hits(second)) == (50, 40)
    other.end("ok")
    await router.finish()
    assert (router.hits(second), router.outcomes) == (50, {"computed": 2})


async def test_however_many_prompts_a_busy_replica_has() -> None:
    router = Router()
    free, *others = [router.chat(prompt(number)) for number in range(1, 22)]
    for chat, home in ((free, "b"), *((other, "c") for other in others)):
        router.fleet.mirror.add(home, router.fleet.caches.chain(chat)[:40])
    router.leave("a")
    router.crowd("c", 50)
    for _ in range(4):
        await router.finish()
    assert router.hits(free) == 50


async def test_what_clients_interrupt_goes_on_with_what_is_still_there() -> None:
    router = Router()
    chat = router.chat(prompt(1, 4001))  # 1,000 blocks
    router.leave("a")
    others = list[Attempt]()

    def crowd() -> None:
        if not others:
            others.append(router.crowd(router.requests[0][0]))

    router.during = crowd
    assert not await router.handover.step()
    assert len(router.requests) == 1
    home, _ = router.requests[0]
    router.fleet.mirror.join(home)  # all is evicted
    others[0].end("ok")
    await router.finish()
    assert [request.expected_tokens for _, request in router.requests[:2]] == [0, 0]
    assert (router.hits(chat), router.outcomes) == (1000, {"computed": 1})


async def test_that_another_replica_leaves_is_seen_between_two_slices() -> None:
    router = Router()
    router.chat(prompt(1, 1001))
    chat = router.chat(prompt(2), to="b")
    router.leave("a")
    router.running.remove("c")  # is back soon

    def other_leaves() -> None:
        router.running[:] = ["c"]
        router.fleet.mirror.drop("b")

    router.during = other_leaves
    assert not await router.handover.step()
    await router.finish()
    assert (router.hits(chat), router.outcomes) == (50, {"computed": 2})


async def test_what_a_draining_replica_still_answers_is_handed_over_too() -> None:
    router = Router()
    router.running.remove("a")
    router.handover.watch()
    chat = router.chat(prompt(1), to="a")
    router.fleet.mirror.drop("a")
    await router.finish()
    assert (router.hits(chat), router.outcomes) == (50, {"computed": 1})


async def test_slices_end_where_a_later_prompt_can_begin() -> None:
    step = 70  # blocks: 0.28 s
    groups = CacheGroup("full_attention", BLOCK), CacheGroup("mamba", step * BLOCK)
    router = Router(Layout(groups, step * BLOCK))
    router.chat(prompt(1, 8001))
    router.leave("a")
    await router.finish()
    ends = [(len(request.token_ids) - 1) // BLOCK for _, request in router.requests]
    assert ends == [*range(step, 2000, step)]
    assert router.fleet.loads.prefill_s("b", ends[-1] * BLOCK, ends[-2] * BLOCK) > SLICE_S


async def test_who_waits_comes_first() -> None:
    router = Router()
    router.chat(prompt(1))
    router.leave("a")
    router.is_free = False
    assert not await router.handover.step()
    assert router.requests == []


async def test_tight_caches_get_nothing_that_pushes_out_what_is_missed_as_much() -> None:
    router = Router()
    router.chat(prompt(1))
    for _ in range(1000):  # half of what was computed had been evicted
        router.fleet.pressure.sent(computed_tokens=1000, evicted_tokens=500)
    router.leave("a")
    await router.finish()
    assert (router.requests, router.outcomes) == ([], {"dropped": 1})


async def test_what_was_not_computed_in_time_is_given_up() -> None:
    router = Router()
    router.chat(prompt(1))
    router.leave("a")
    router.now_s += MOST_TIME_S
    await router.finish()
    assert (router.requests, router.outcomes) == ([], {"dropped": 1})


async def test_a_turn_that_has_come_back_meanwhile_is_not_computed() -> None:
    router = Router()
    first = router.chat(prompt(1))
    router.leave("a")
    router.chat(np.concatenate([first, prompt(5)]), to="b")
    await router.finish()
    assert (router.requests, router.outcomes) == ([], {"dropped": 1})


async def test_a_long_prompt_goes_in_slices_behind_requests_of_clients() -> None:
    router = Router()
    router.chat(prompt(1, 1001))  # a second
    router.leave("a")
    await router.finish()
    lengths = [len(request.token_ids) - 1 for _, request in router.requests]
    assert len(lengths) >= 1.0 / SLICE_S
    assert [request.expected_tokens for _, request in router.requests] == [0, *lengths[:-1]]
    assert all(request.order_s > 0 for _, request in router.requests)


async def test_it_counts_as_load_and_as_no_turn_of_a_conversation() -> None:
    router = Router()
    router.chat(prompt(1))
    turns = len(router.fleet.returns)
    router.leave("a")
    await router.finish()
    assert [attempt.outcome for attempt in router.told] == ["ok"]
    assert [attempt.dispatch.turn for attempt in router.told] == [None]
    assert len(router.fleet.returns) == turns


async def test_a_replica_that_does_not_answer_costs_one_prompt() -> None:
    router = Router()
    router.chat(prompt(1))
    router.chat(prompt(2))
    router.leave("a")
    router.is_broken = True
    await router.handover.step()
    router.is_broken = False
    await router.finish()
    assert router.outcomes == {"failed": 1, "computed": 1}
    assert [attempt.outcome for attempt in router.told] == ["failed", "ok"]


async def test_an_error_with_one_prompt_does_not_end_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = Router()
    router.chat(prompt(1))
    router.leave("a")
    monkeypatch.setattr(router.fleet, "place", None)
    await router.finish()
    assert router.outcomes == {"failed": 1}


async def test_a_replica_that_is_back_has_not_left() -> None:
    router = Router()
    router.running.remove("a")
    router.handover.watch()
    router.running.append("a")
    router.handover.watch()
    router.chat(prompt(1))
    await router.finish()
    assert router.outcomes == {}


async def test_that_serve_tells_of_nobody_is_no_departure() -> None:
    router = Router()
    router.chat(prompt(1))
    everybody, router.running = router.running, []
    router.handover.watch()
    router.running = everybody
    router.handover.watch()
    assert not await router.handover.step()
    assert router.outcomes == {}


@given(st.integers(0, 1000), st.integers(1, 1000), st.floats(1e-5, 1.0))
def test_a_slice_is_short_or_one_block(begin: int, blocks: int, block_s: float) -> None:
    def prefill_s(end: int) -> float:
        return (end - begin) * block_s

    end = slice_end(begin, begin + blocks, prefill_s)
    assert begin < end <= begin + blocks
    assert end == begin + 1 or prefill_s(end) <= SLICE_S
    assert end == begin + blocks or prefill_s(end + 1) > SLICE_S
