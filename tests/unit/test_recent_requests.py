"""Sums over the prompts of recent requests cover the last minutes."""

import random
from collections import Counter

import pytest

from kvroute.router.observability.recent_requests import RecentTokens, quantile, summed
from kvroute.router.observability.rolling_window import BUCKET_S, WINDOW_S
from kvroute.router.placement.ledger import Ledger, account


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def ledger(tokens: int, delivered: int = 0) -> Ledger:
    return account(tokens, cacheable=tokens, reusable=0, expected=0, delivered=delivered)


def test_sums_cover_the_window_whenever_they_are_read() -> None:
    clock, rng = Clock(), random.Random(0)
    window, added = RecentTokens(clock), list[tuple[float, str, int]]()
    for _ in range(2000):
        clock.now_s += rng.expovariate(0.3)
        replica_id, tokens = rng.choice("abc"), rng.randrange(100)
        window.add(replica_id, ledger(tokens))
        added.append((clock.now_s, replica_id, tokens))
        oldest_s = BUCKET_S * (clock.now_s // BUCKET_S + 1) - WINDOW_S
        expected = Counter[str]()
        for at_s, name, count in added:
            if at_s >= oldest_s:
                expected[name] += count
        assert {name: sums.tokens.new for name, sums in window.sums().items()} == expected


def test_a_replica_without_a_request_in_the_window_is_forgotten() -> None:
    clock = Clock()
    window = RecentTokens(clock)
    window.add("gone", ledger(10, delivered=4))
    assert (window.sums()["gone"].hit_tokens, window.sums()["gone"].prompt_tokens) == (4, 10)
    clock.now_s += WINDOW_S
    assert window.sums() == {}
    assert not window._window.parts()


def test_an_answer_that_two_replicas_gave_is_one_answered_request() -> None:
    clock = Clock()
    window = RecentTokens(clock)
    window.add("lost", ledger(10), is_answered=False)
    window.add("b", ledger(10))
    found = summed(window.sums().values())
    assert (found["requests"], found["tokens"]["new"]) == (1, 20)
    clock.now_s += WINDOW_S
    assert window.sums() == {}


def test_evicted_tokens_are_summed_by_reason_and_leave_the_window_with_their_request() -> None:
    clock = Clock()
    window = RecentTokens(clock)
    whys = ["usual", "ended", "usual"]
    for tokens, why in zip((10, 20, 30), whys, strict=True):
        lost = account(tokens, cacheable=tokens, reusable=0, expected=0, delivered=0, known=tokens)
        window.add("a", lost, why)
        clock.now_s += WINDOW_S / 2 + BUCKET_S
    found = summed(window.sums().values())
    assert found["evicted"] == {"ended": 0, "unlikely": 0, "usual": 30}
    assert found["tokens"]["evicted"] == 30


@pytest.mark.parametrize(
    ("times_s", "percent", "time_s"),
    [([], 50, None), ([7.0], 90, 7.0), ([2.0, 1.0], 50, 1.5), ([9.0, 1.0, 2.0], 50, 2.0)],
)
def test_quantiles_need_no_order_and_few_times(
    times_s: list[float], percent: int, time_s: float | None
) -> None:
    assert quantile(times_s, percent) == time_s
