"""Tenants never exceed their limits, however many routers there are."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.features.keys.limit_headers import OverLimitError
from kvroute.features.keys.limits import NO_LIMITS, TenantLimits
from kvroute.features.keys.router_keys import decode, encode
from kvroute.features.keys.router_limits import (
    MAX_TENANTS,
    CountedEntry,
    Limits,
    TenantCounts,
    TenantReport,
    Usage,
)

A = "acme"
DELAY = 3  # steps that a message takes
STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "leave"]), st.integers(0, 3), st.integers(1, 40)),
    max_size=60,
)


def limits(**fields: Any) -> Limits:
    own = TenantLimits(**fields)
    return Limits(lambda tenant: own if tenant == A else NO_LIMITS)


def entered(router: Limits, now_s: float = 0.0) -> CountedEntry:
    entry = router.enter(A, now_s)
    assert entry
    return entry


def report(one: Limits, other: Limits, now_s: float = 0.0, name: str = "one") -> None:
    other.receive(name, one.report(now_s), now_s)


def spend(router: Limits, tokens: int, now_s: float, id_: str = "p") -> CountedEntry:
    """Send a prompt without cached tokens."""
    entry = entered(router, now_s)
    try:
        entry.add_prompt_tokens(tokens, 0.0)
        entry.admit(id_, tokens, tokens, now_s)
    finally:
        entry.leave()
    return entry


def test_a_tenant_without_limits_is_not_counted() -> None:
    router = limits(max_requests=1)
    assert router.enter("other", 0.0) is None
    assert router.report(0.0) == TenantReport([], is_complete=True)
    assert limits(max_prefixes=1).enter(A, 0.0) is None


@given(STEPS, st.integers(1, 5), st.integers(1, 100))
def test_one_router_stays_within_its_limits_and_ends_at_zero(
    steps: list[tuple[str, int, int]], requests: int, tokens: int
) -> None:
    router = limits(max_requests=requests, max_prompt_tokens=tokens)
    under_way: list[CountedEntry] = []
    for what, which, size in steps:
        if what == "leave" and under_way:
            under_way.pop(which % len(under_way)).leave()
        elif what == "enter":
            try:
                under_way.append(entered(router))
                under_way[-1].add_prompt_tokens(size, 0.0)
            except OverLimitError as error:
                if error.limit == "prompt_tokens":
                    under_way.pop().leave()
        running, running_tokens = router.in_flight(A)
        assert running == len(under_way) <= requests
        assert 0 <= running_tokens <= tokens
    for entry in under_way:
        entry.leave()
        entry.leave()
    assert router.in_flight(A) == (0, 0)


@dataclass
class Routers:
    """Routers that receive each other's reports DELAY steps later."""

    all: list[Limits]
    under_way: list[list[CountedEntry]] = field(default_factory=list)
    admitted: list[tuple[int, int, int]] = field(default_factory=list)  # step, router, tokens
    on_the_way: deque[tuple[int, int, bytes]] = field(default_factory=deque)

    def step(self, now: int, number: int, what: str, tokens: int) -> None:
        self._deliver(now)
        if what == "leave" and self.under_way[number]:
            self.under_way[number].pop().leave()
        elif what == "enter":
            self._enter(now, number, tokens)
        self.on_the_way.append((now + DELAY, number, encode(self.all[number].report(now))))

    def _enter(self, now: int, number: int, tokens: int) -> None:
        entry = None
        try:
            entry = entered(self.all[number], now)
            entry.add_prompt_tokens(tokens, 0.0)
        except OverLimitError:
            if entry:
                entry.leave()
            return
        self.under_way[number].append(entry)
        self.admitted.append((now, number, tokens))

    def _deliver(self, now: int) -> None:
        while self.on_the_way and self.on_the_way[0][0] <= now:
            _, sender, report = self.on_the_way.popleft()
            for number, router in enumerate(self.all):
                if number != sender:
                    router.receive(str(sender), decode(report), now)

    def together(self) -> tuple[int, int]:
        """Return the requests and prompt tokens that are in flight on all routers now."""
        own = [router._usages.get(A, Usage()) for router in self.all]
        return sum(usage.requests for usage in own), sum(usage.prompt_tokens for usage in own)

    def unreported(self, now: int, by: int) -> tuple[int, int]:
        """Return the requests and tokens that other routers admitted and have not reported yet."""
        late = [n for step, number, n in self.admitted if step > now - DELAY and number != by]
        return len(late), sum(late)


@given(STEPS, st.integers(1, 4), st.integers(1, 100))
def test_routers_together_exceed_a_limit_only_by_requests_not_yet_reported(
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
            unreported = routers.unreported(now, number)
            assert routers.together()[0] <= requests + unreported[0]
            assert routers.together()[1] <= tokens + unreported[1]


def test_a_request_counts_at_other_routers_until_its_end_is_reported() -> None:
    one, other = limits(max_requests=1), limits(max_requests=1)
    report(one, other)
    entry = entered(one)
    report(one, other)
    with pytest.raises(OverLimitError) as refused:
        entered(other)
    assert (refused.value.limit, refused.value.maximum) == ("requests", 1)
    entry.leave()
    report(one, other)
    entered(other)


def test_a_complete_report_replaces_a_lost_one_within_a_second() -> None:
    one, other = limits(max_requests=1), limits(max_requests=1)
    report(one, other)
    entry = entered(one)
    report(one, other)
    entry.leave()
    one.report(0.5)  # lost
    report(one, other, 0.8)
    assert other.in_flight(A) == (1, 0)
    report(one, other, 1.0)
    assert other.in_flight(A) == (0, 0)


def test_the_requests_of_a_forgotten_router_no_longer_count() -> None:
    one, other = limits(max_requests=1), limits(max_requests=1)
    entered(one)
    report(one, other)
    assert other.in_flight(A) == (1, 0)
    other.forget("one")
    entered(other)


def test_cut_off_routers_enforce_their_share_and_at_least_one_request() -> None:
    routers = [limits(max_requests=5) for _ in range(3)]
    for one in routers:
        for other in routers:
            if one is not other:
                other.receive(f"{id(one)}", TenantReport([], is_complete=True), 0.0)
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
        few.receive(name, TenantReport([], is_complete=True), 0.0)
    few.cut_off(0.0)
    entered(few)
    with pytest.raises(OverLimitError):
        entered(few)


def test_a_router_alone_has_the_whole_limit_without_redis() -> None:
    router = limits(max_requests=2)
    router.cut_off(0.0)
    entered(router)
    entered(router)


def test_a_prompt_above_the_share_of_its_limit_is_admitted_alone() -> None:
    router = limits(max_prompt_tokens=100)
    router.receive("other", TenantReport([], is_complete=True), 0.0)
    router.cut_off(0.0)
    entered(router).add_prompt_tokens(80, 0.0)
    with pytest.raises(OverLimitError):
        entered(router).add_prompt_tokens(1, 0.0)


def test_a_prompt_above_the_limit_is_never_admitted() -> None:
    with pytest.raises(OverLimitError) as refused:
        entered(limits(max_prompt_tokens=100)).add_prompt_tokens(101, 0.0)
    assert math.isinf(refused.value.wait_s)


def test_cached_prompts_are_admitted_while_uncached_ones_wait() -> None:
    router = limits(uncached_tokens_per_minute=600)
    spend(router, 400, 0.0)
    with pytest.raises(OverLimitError) as refused:
        spend(router, 400, 0.0, "q")
    assert refused.value.wait_s == pytest.approx(10.0)  # until half a minute's are free
    for number in range(10):
        entry = entered(router)
        entry.add_prompt_tokens(400, 0.0)
        entry.admit(f"cached {number}", 400, 10, 0.0)
        entry.leave()
    spend(router, 400, 20.0, "r")


def test_a_prompt_above_the_limit_per_minute_is_admitted_and_later_ones_wait() -> None:
    router = limits(uncached_tokens_per_minute=600)
    spend(router, 6000, 0.0)
    with pytest.raises(OverLimitError) as refused:
        spend(router, 1, 300.0, "q")
    assert refused.value.wait_s == pytest.approx(240.1)
    spend(router, 1, 300.0 + refused.value.wait_s, "r")


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 900)), max_size=50))
def test_a_tenant_spends_no_more_than_its_limit_per_minute(
    prompts: list[tuple[int, int]],
) -> None:
    """The bound also has a first full minute, and the tokens of one prompt above its half."""
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


def test_tokens_that_the_engine_had_cached_are_refunded() -> None:
    router = limits(uncached_tokens_per_minute=600)
    entry = spend(router, 600, 0.0)
    entry.charge_computed("p", 20, 0.0)
    assert router.headroom(A, 0.0)["tokens"].left == 580
    entry.charge_computed("p", 50, 0.0)
    entry.charge_computed("unknown", 500, 0.0)
    assert router.headroom(A, 0.0)["tokens"].left == 550
    entry.refund(0.0)
    assert router.headroom(A, 0.0)["tokens"].left == 550
    spend(router, 100, 0.0, "refused").refund(0.0)
    assert router.headroom(A, 0.0)["tokens"].left == 550


def test_a_prompt_that_moves_to_another_replica_is_charged_once() -> None:
    router = limits(uncached_tokens_per_minute=600)
    entry = entered(router)
    for _ in range(3):
        entry.admit("p", 200, 200, 0.0)
    assert router.headroom(A, 0.0)["tokens"].left == 400


def test_a_call_with_several_prompts_is_one_request_and_all_its_tokens() -> None:
    router = limits(max_requests=1, uncached_tokens_per_minute=600)
    spend(router, 400, 0.0)
    entry = entered(router)
    entry.add_prompt_tokens(300, 0.0)
    with pytest.raises(OverLimitError) as refused:
        entry.admit("0", 100, 90, 0.0)
    assert refused.value.requested == 270
    entry.admit("0", 100, 20, 0.0)
    for number in (1, 2):
        entry.admit(str(number), 100, 100, 0.0)  # only the first prompt of a call is checked
    assert router.headroom(A, 0.0)["tokens"].left == 0


def test_the_limit_per_minute_is_shared_by_all_routers() -> None:
    one, other = limits(uncached_tokens_per_minute=600), limits(uncached_tokens_per_minute=600)
    report(one, other)
    spend(one, 400, 0.0)
    report(one, other, 0.5)
    with pytest.raises(OverLimitError):
        spend(other, 400, 0.5)
    spend(other, 400, 30.5, "q")


def test_a_new_router_learns_the_debt_of_tenants_and_charges_it_once() -> None:
    one, new = limits(uncached_tokens_per_minute=600), limits(uncached_tokens_per_minute=600)
    spend(one, 500, 0.0)
    one.report(0.0)
    report(one, new, 1.0)
    assert new.headroom(A, 1.0)["tokens"].left == pytest.approx(110)
    for at_s in (2.0, 3.0):
        report(one, new, at_s)
    assert new.headroom(A, 3.0)["tokens"].left == pytest.approx(130, abs=1)


def test_tokens_spent_before_a_routers_first_complete_report_are_not_charged() -> None:
    one, new = limits(uncached_tokens_per_minute=600), limits(uncached_tokens_per_minute=600)
    spend(one, 500, 0.0)
    one.report(0.0)
    entered(one, 0.5)
    report(one, new, 0.5)  # not complete
    assert new.in_flight(A) == (0, 0)
    new.receive("one", TenantReport([TenantCounts("b", 1, 0, 0, 0)], is_complete=False), 0.6)
    spend(one, 1, 50.0)
    report(one, new, 50.0)
    assert new.headroom(A, 50.0)["tokens"].left == pytest.approx(599, abs=1)


def test_a_debt_is_divided_like_the_limit() -> None:
    router = limits(uncached_tokens_per_minute=600)
    router.receive("other", TenantReport([], is_complete=True), 0.0)
    spend(router, 400, 0.0)
    router.cut_off(0.0)
    assert router.headroom(A, 0.0)["tokens"].left == 100
    router.rejoin(30.0)
    assert router.headroom(A, 30.0)["tokens"].left == 500


def test_idle_tenants_take_no_memory() -> None:
    every = TenantLimits(max_requests=9, uncached_tokens_per_minute=600)
    router, other = Limits(lambda _: every), Limits(lambda _: every)
    report(router, other)
    for number in range(100):
        entry = router.enter(f"t{number}", 0.0)
        assert entry
        entry.add_prompt_tokens(10, 0.0)
        entry.admit("p", 10, 10, 0.0)
        entry.leave()
    report(router, other, 0.5)
    assert len(router._usages) == len(other._others["one"]) == 100
    report(router, other, 70.0)
    other.report(70.0)
    assert not router._usages
    assert not other._usages
    assert not other._others["one"]


def test_the_tenants_of_another_router_are_bounded() -> None:
    router = limits(max_requests=1)
    many = [TenantCounts(str(number), 1, 1, 1, 1) for number in range(2 * MAX_TENANTS)]
    router.receive("other", TenantReport(many, is_complete=True), 0.0)
    router.receive("other", TenantReport(many[::-1], is_complete=False), 0.0)
    assert len(router._others["other"]) == MAX_TENANTS
    assert not router._usages


def test_limits_can_change_while_requests_are_in_flight() -> None:
    own = {A: TenantLimits(max_requests=1, uncached_tokens_per_minute=600)}
    router = Limits(lambda tenant: own.get(tenant, NO_LIMITS))
    entry = spend(router, 600, 0.0)
    held = entered(router, 60.0)
    own[A] = TenantLimits(max_requests=2)
    entered(router, 60.0).leave()
    own.clear()
    assert router.enter(A, 60.0) is None
    held.add_prompt_tokens(5, 0.0)
    held.leave()
    entry.charge_computed("p", 5, 60.0)
    router.report(100.0)
    assert not router._usages


def test_computed_tokens_of_a_refused_request_are_charged() -> None:
    """Otherwise a tenant could fill the caches for free, with a bad prompt among good ones."""
    router = limits(uncached_tokens_per_minute=100)
    entry = entered(router)
    entry.add_prompt_tokens(90, 0.0)
    entry.admit("good", 40, 40, 0.0)
    entry.admit("bad", 50, 50, 0.0)
    entry.charge_computed("good", 40, 0.0)
    entry.refund(0.0)
    assert router.headroom(A, 0.0)["tokens"].left == 60


def test_the_debt_that_another_router_reports_is_bounded() -> None:
    router, huge = limits(uncached_tokens_per_minute=60), 2**48
    for n in range(5):
        counts = [TenantCounts(A, 0, 0, n * huge, huge)]
        router.receive("liar", TenantReport(counts, is_complete=True), 0.0)
    assert router.headroom(A, 0.0)["tokens"].reset_s <= 11 * 60
    spend(router, 2**49, 700.0)
    report = router.report(700.0)
    assert decode(encode(report)) == report


def test_tenants_beyond_the_bound_are_not_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvroute.features.keys.router_limits.MAX_TENANTS", 2)
    own = TenantLimits(uncached_tokens_per_minute=1000)
    router = Limits(lambda tenant: own)
    for n in range(5):
        counts = [TenantCounts(tenant, 0, 0, 100, 0) for tenant in "abc"]
        router.receive("one", TenantReport(counts, is_complete=n % 2 == 0), 0.0)
    assert [left_of(router, tenant) for tenant in "abc"] == [1000, 1000, 1000]
    counts = [TenantCounts(tenant, 0, 0, 150, 0) for tenant in "abc"]
    router.receive("one", TenantReport(counts, is_complete=False), 0.0)
    assert [left_of(router, tenant) for tenant in "abc"] == [950, 950, 1000]


def left_of(router: Limits, tenant: str) -> int:
    return router.headroom(tenant, 0.0)["tokens"].left
