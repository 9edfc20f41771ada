"""What tenants have under way never goes over their limits, however many routers there are."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.contract.messages import RouterMessage, TenantCounts, decode, encode
from kvroute.contract.records import VERSION
from kvroute.keys.limits import TenantLimits
from kvroute.router.admission.limits import BUSY_TENANTS, Entry, Limits, OverLimitError, Usage

A = "acme"
DELAY = 3  # steps that a message takes
STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "leave"]), st.integers(0, 3), st.integers(1, 40)),
    max_size=60,
)


class OldMessage(msgspec.Struct, array_like=True):
    """As routers read it before there were limits."""

    version: int
    router: str
    events: list[Any]


def limits(**fields: Any) -> Limits:
    own = TenantLimits(**fields)
    return Limits(lambda tenant: own if tenant == A else None)


def entered(router: Limits, now_s: float = 0.0) -> Entry:
    entry = router.enter(A, now_s)
    assert entry
    return entry


def tell(one: Limits, other: Limits, now_s: float = 0.0, name: str = "one") -> None:
    counts, is_complete = one.report(now_s)
    other.receive(name, counts, is_complete=is_complete, now_s=now_s)


def spend(router: Limits, tokens: int, now_s: float, id_: str = "p") -> Entry:
    """A prompt of which nothing is cached."""
    entry = entered(router, now_s)
    try:
        entry.take(tokens)
        entry.admit(id_, tokens, tokens, now_s)
    finally:
        entry.leave()
    return entry


def test_a_tenant_without_limits_is_not_counted() -> None:
    router = limits(max_requests=1)
    assert router.enter("other", 0.0) is None
    assert router.report(0.0) == ([], True)
    assert limits(max_prefixes=1).enter(A, 0.0) is None


@given(STEPS, st.integers(1, 5), st.integers(1, 100))
def test_one_router_stays_within_its_limits_and_ends_at_zero(
    steps: list[tuple[str, int, int]], requests: int, tokens: int
) -> None:
    router = limits(max_requests=requests, max_prompt_tokens=tokens)
    under_way: list[Entry] = []
    for what, which, size in steps:
        if what == "leave" and under_way:
            under_way.pop(which % len(under_way)).leave()
        elif what == "enter":
            try:
                under_way.append(entered(router))
                under_way[-1].take(size)
            except OverLimitError as error:
                if error.limit == "prompt_tokens":
                    under_way.pop().leave()
        found = router.under_way(A)
        assert found[0] == len(under_way) <= requests
        assert 0 <= found[1] <= tokens
    for entry in under_way:
        entry.leave()
        entry.leave()
    assert router.under_way(A) == (0, 0)


@dataclass
class Routers:
    """Some that hear each other DELAY steps later."""

    all: list[Limits]
    under_way: list[list[Entry]] = field(default_factory=list)
    admitted: list[tuple[int, int, int]] = field(default_factory=list)  # step, router, tokens
    on_the_way: deque[tuple[int, int, RouterMessage]] = field(default_factory=deque)

    def step(self, now: int, number: int, what: str, tokens: int) -> None:
        self._deliver(now)
        if what == "leave" and self.under_way[number]:
            self.under_way[number].pop().leave()
        elif what == "enter":
            self._enter(now, number, tokens)
        counts, is_complete = self.all[number].report(now)
        self.on_the_way.append(
            (now + DELAY, number, RouterMessage(VERSION, "", [], counts, is_complete))
        )

    def _enter(self, now: int, number: int, tokens: int) -> None:
        entry = None
        try:
            entry = entered(self.all[number], now)
            entry.take(tokens)
        except OverLimitError:
            if entry:
                entry.leave()
            return
        self.under_way[number].append(entry)
        self.admitted.append((now, number, tokens))

    def _deliver(self, now: int) -> None:
        while self.on_the_way and self.on_the_way[0][0] <= now:
            _, sender, message = self.on_the_way.popleft()
            message = decode(encode(message))
            for number, router in enumerate(self.all):
                if number != sender:
                    router.receive(
                        str(sender), message.tenants, is_complete=message.is_complete, now_s=now
                    )

    def together(self) -> tuple[int, int]:
        """Requests and prompt tokens under way, as nobody knows them at once."""
        own = [router._usages.get(A, Usage()) for router in self.all]
        return sum(each.requests for each in own), sum(each.prompt_tokens for each in own)

    def unheard(self, now: int, by: int) -> tuple[int, int]:
        """What the others have let in and this one cannot know of."""
        late = [n for at, number, n in self.admitted if at > now - DELAY and number != by]
        return len(late), sum(late)


@given(STEPS, st.integers(1, 4), st.integers(1, 100))
def test_routers_together_go_over_by_what_a_message_has_not_told_yet(
    steps: list[tuple[str, int, int]], requests: int, tokens: int
) -> None:
    own = {"max_requests": requests, "max_prompt_tokens": tokens}
    routers = Routers([limits(**own) for _ in range(4)], [[] for _ in range(4)])
    for number in range(4):  # each is known to the others
        routers.step(-10, number, "", 0)
    for now, (what, number, size) in enumerate(steps):
        before = len(routers.admitted)
        routers.step(now, number, what, size)
        if len(routers.admitted) > before:
            unheard = routers.unheard(now, number)
            assert routers.together()[0] <= requests + unheard[0]
            assert routers.together()[1] <= tokens + unheard[1]


def test_a_request_counts_at_the_other_routers_until_it_ends_there() -> None:
    one, other = limits(max_requests=1), limits(max_requests=1)
    tell(one, other)
    entry = entered(one)
    tell(one, other)
    with pytest.raises(OverLimitError) as refused:
        entered(other)
    assert (refused.value.limit, refused.value.most) == ("requests", 1)
    entry.leave()
    tell(one, other)
    entered(other)


def test_what_a_lost_message_had_told_is_told_again_within_a_second() -> None:
    one, other = limits(max_requests=1), limits(max_requests=1)
    tell(one, other)
    entry = entered(one)
    tell(one, other)
    entry.leave()
    one.report(0.5)  # lost
    tell(one, other, 0.8)
    assert other.under_way(A) == (1, 0)
    tell(one, other, 1.0)
    assert other.under_way(A) == (0, 0)


def test_a_router_that_is_gone_takes_its_requests_with_it() -> None:
    one, other = limits(max_requests=1), limits(max_requests=1)
    entered(one)
    tell(one, other)
    assert other.under_way(A) == (1, 0)
    other.forget("one")
    entered(other)


def test_cut_off_routers_enforce_their_share_and_at_least_one_request() -> None:
    routers = [limits(max_requests=5) for _ in range(3)]
    for one in routers:
        for other in routers:
            if one is not other:
                other.receive(f"{id(one)}", [], is_complete=True, now_s=0.0)
    for router in routers:
        router.cut_off(0.0)
        router.cut_off(0.5)  # Redis is tried again
        entered(router)  # 5 // 3 each
        with pytest.raises(OverLimitError) as refused:
            entered(router)
        assert refused.value.shared_by == 3
    routers[0].rejoin(9.0)
    entered(routers[0])
    few = limits(max_requests=2)
    for name in "abc":
        few.receive(name, [], is_complete=True, now_s=0.0)
    few.cut_off(0.0)
    entered(few)
    with pytest.raises(OverLimitError):
        entered(few)


def test_a_router_alone_has_the_whole_limit_without_redis() -> None:
    router = limits(max_requests=2)
    router.cut_off(0.0)
    entered(router)
    entered(router)


def test_a_prompt_above_its_share_comes_in_alone() -> None:
    router = limits(max_prompt_tokens=100)
    router.receive("other", [], is_complete=True, now_s=0.0)
    router.cut_off(0.0)
    entered(router).take(80)
    with pytest.raises(OverLimitError):
        entered(router).take(1)


def test_a_prompt_that_can_never_come_in_is_told_so() -> None:
    with pytest.raises(OverLimitError) as refused:
        entered(limits(max_prompt_tokens=100)).take(101)
    assert math.isinf(refused.value.wait_s)


def test_cached_prompts_come_in_while_uncached_ones_wait() -> None:
    router = limits(uncached_tokens_per_minute=600)
    spend(router, 400, 0.0)
    with pytest.raises(OverLimitError) as refused:
        spend(router, 400, 0.0, "q")
    assert refused.value.wait_s == pytest.approx(10.0)  # until half a minute's are free
    for number in range(10):
        entry = entered(router)
        entry.take(400)
        entry.admit(f"cached {number}", 400, 10, 0.0)
        entry.leave()
    spend(router, 400, 20.0, "r")


def test_a_prompt_larger_than_a_minute_comes_in_and_is_made_good() -> None:
    router = limits(uncached_tokens_per_minute=600)
    spend(router, 6000, 0.0)
    with pytest.raises(OverLimitError) as refused:
        spend(router, 1, 300.0, "q")
    assert refused.value.wait_s == pytest.approx(240.1)
    spend(router, 1, 300.0 + refused.value.wait_s, "r")


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 900)), max_size=50))
def test_a_minutes_tokens_are_all_that_comes_in_each_minute(
    prompts: list[tuple[int, int]],
) -> None:
    """And what fills the first one, and what the last one has above its half."""
    router, now_s, spent = limits(uncached_tokens_per_minute=600), 0, 0
    for number, (pause_s, tokens) in enumerate(prompts):
        now_s += pause_s
        try:
            spend(router, tokens, now_s, str(number))
        except OverLimitError as error:
            spend(router, tokens, now_s + error.wait_s + 1e-6, f"then {number}")
            now_s = math.ceil(now_s + error.wait_s + 1e-6)
        spent += tokens
        assert spent <= 600 + 10 * (now_s + 1) + 900


def test_what_the_engine_had_cached_is_not_charged_after_all() -> None:
    router = limits(uncached_tokens_per_minute=600)
    entry = spend(router, 600, 0.0)
    entry.computed("p", 20, 0.0)
    assert router.room(A, 0.0).tokens_left == 580
    entry.computed("p", 50, 0.0)
    entry.computed("unknown", 500, 0.0)
    assert router.room(A, 0.0).tokens_left == 550
    entry.give_back(0.0)
    assert router.room(A, 0.0).tokens_left == 550
    spend(router, 100, 0.0, "refused").give_back(0.0)
    assert router.room(A, 0.0).tokens_left == 550


def test_a_prompt_that_moves_to_another_replica_is_charged_once() -> None:
    router = limits(uncached_tokens_per_minute=600)
    entry = entered(router)
    for _ in range(3):
        entry.admit("p", 200, 200, 0.0)
    assert router.room(A, 0.0).tokens_left == 400


def test_a_call_with_several_prompts_is_one_request_and_all_its_tokens() -> None:
    router = limits(max_requests=1, uncached_tokens_per_minute=600)
    spend(router, 400, 0.0)
    entry = entered(router)
    entry.take(300)
    with pytest.raises(OverLimitError) as refused:
        entry.admit("0", 100, 90, 0.0)
    assert refused.value.asked == 270
    entry.admit("0", 100, 20, 0.0)
    for number in (1, 2):
        entry.admit(str(number), 100, 100, 0.0)  # begun together, or not at all
    assert router.room(A, 0.0).tokens_left == 0


def test_routers_spend_one_minute_together() -> None:
    one, other = limits(uncached_tokens_per_minute=600), limits(uncached_tokens_per_minute=600)
    tell(one, other)
    spend(one, 400, 0.0)
    tell(one, other, 0.5)
    with pytest.raises(OverLimitError):
        spend(other, 400, 0.5)
    spend(other, 400, 30.5, "q")


def test_a_new_router_learns_what_was_spent_and_nobody_pays_twice() -> None:
    one, new = limits(uncached_tokens_per_minute=600), limits(uncached_tokens_per_minute=600)
    spend(one, 500, 0.0)
    one.report(0.0)
    tell(one, new, 1.0)
    assert new.room(A, 1.0).tokens_left == pytest.approx(110)
    for at_s in (2.0, 3.0):
        tell(one, new, at_s)
    assert new.room(A, 3.0).tokens_left == pytest.approx(130, abs=1)


def test_what_a_router_spent_before_it_was_known_is_not_charged_at_once() -> None:
    one, new = limits(uncached_tokens_per_minute=600), limits(uncached_tokens_per_minute=600)
    spend(one, 500, 0.0)
    one.report(0.0)
    entered(one, 0.5)
    tell(one, new, 0.5)  # not complete
    assert new.under_way(A) == (0, 0)
    new.receive("one", [TenantCounts("b", 1, 0, 0, 0)], is_complete=False, now_s=0.6)
    spend(one, 1, 50.0)
    tell(one, new, 50.0)
    assert new.room(A, 50.0).tokens_left == pytest.approx(599, abs=1)


def test_a_debt_is_shared_like_the_limit() -> None:
    router = limits(uncached_tokens_per_minute=600)
    router.receive("other", [], is_complete=True, now_s=0.0)
    spend(router, 400, 0.0)
    router.cut_off(0.0)
    assert router.room(A, 0.0).tokens_left == 100
    router.rejoin(30.0)
    assert router.room(A, 30.0).tokens_left == 500


def test_idle_tenants_take_no_memory() -> None:
    every = TenantLimits(max_requests=9, uncached_tokens_per_minute=600)
    router, other = Limits(lambda _: every), Limits(lambda _: every)
    tell(router, other)
    for number in range(100):
        entry = router.enter(f"t{number}", 0.0)
        assert entry
        entry.take(10)
        entry.admit("p", 10, 10, 0.0)
        entry.leave()
    tell(router, other, 0.5)
    assert len(router._usages) == len(other._others["one"]) == 100
    tell(router, other, 70.0)
    other.report(70.0)
    assert not router._usages
    assert not other._usages
    assert not other._others["one"]


def test_another_router_cannot_fill_the_memory() -> None:
    router = limits(max_requests=1)
    many = [TenantCounts(str(number), 1, 1, 1, 1) for number in range(2 * BUSY_TENANTS)]
    router.receive("other", many, is_complete=True, now_s=0.0)
    router.receive("other", many[::-1], is_complete=False, now_s=0.0)
    assert len(router._others["other"]) == BUSY_TENANTS
    assert not router._usages


def test_limits_change_under_way() -> None:
    own = {A: TenantLimits(max_requests=1, uncached_tokens_per_minute=600)}
    router = Limits(own.get)
    entry = spend(router, 600, 0.0)
    held = entered(router, 60.0)
    own[A] = TenantLimits(max_requests=2)
    entered(router, 60.0).leave()
    own.clear()
    assert router.enter(A, 60.0) is None
    held.take(5)
    held.leave()
    entry.computed("p", 5, 60.0)
    router.report(100.0)
    assert not router._usages


def test_routers_from_before_limits_understand_the_others_and_are_understood() -> None:
    old = msgspec.msgpack.encode([VERSION, "r", []])
    assert (decode(old).tenants, decode(old).is_complete) == ([], False)
    new = encode(RouterMessage(VERSION, "r", [], [TenantCounts(A, 1, 2, 3, 4)], True))
    assert msgspec.msgpack.decode(new, type=OldMessage).router == "r"


def test_what_was_computed_is_paid_for_though_the_request_is_refused() -> None:
    """Else a bad prompt beside good ones would bring the good ones into the caches for nothing."""
    router = limits(uncached_tokens_per_minute=100)
    entry = entered(router)
    entry.take(90)
    entry.admit("good", 40, 40, 0.0)
    entry.admit("bad", 50, 50, 0.0)
    entry.computed("good", 40, 0.0)
    entry.give_back(0.0)
    assert router.room(A, 0.0).tokens_left == 60


def test_another_router_can_make_a_tenant_owe_some_minutes_and_no_more() -> None:
    router, most = limits(uncached_tokens_per_minute=60), 2**48
    for n in range(5):
        told = [TenantCounts(A, 0, 0, n * most, most)]
        router.receive("liar", told, is_complete=True, now_s=0.0)
    assert router.room(A, 0.0).tokens_reset_s <= 11 * 60
    spend(router, 2**49, 700.0)
    counts, _ = router.report(700.0)
    message = RouterMessage(VERSION, "router", [], counts, True)
    assert decode(encode(message)).tenants == counts


def test_tenants_for_whom_there_is_no_room_are_charged_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvroute.router.admission.limits.BUSY_TENANTS", 2)
    own = TenantLimits(uncached_tokens_per_minute=1000)
    router = Limits(lambda tenant: own)
    for n in range(5):
        told = [TenantCounts(tenant, 0, 0, 100, 0) for tenant in "abc"]
        router.receive("one", told, is_complete=n % 2 == 0, now_s=0.0)
    assert [router.room(tenant, 0.0).tokens_left for tenant in "abc"] == [1000, 1000, 1000]
    told = [TenantCounts(tenant, 0, 0, 150, 0) for tenant in "abc"]
    router.receive("one", told, is_complete=False, now_s=0.0)
    assert [router.room(tenant, 0.0).tokens_left for tenant in "abc"] == [950, 950, 1000]
