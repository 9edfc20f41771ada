"""How many requests a batch keeps open on modelled clusters of many speeds and sizes."""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.batch.window import START, Window

LIMIT = 2000


@dataclass
class ModelledCluster:
    """Answers lines: first a router, one after the other, and then replicas, side by side."""

    answer_s: float = 1.0  # a replica's time for a line
    places: int = 1 << 30  # lines that the replicas answer at the same time; the others wait
    router_s: float = 0.0  # the router's time for a line
    batching: float = math.inf  # with this many lines on the replicas, each takes twice as long
    spread: float = 0.5  # standard deviation of a line's time, relative to its mean
    says_waits: bool = True  # whether answers say how long their lines have waited
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def time_s(self, mean_s: float) -> float:
        sigma = math.sqrt(math.log1p(self.spread**2))
        return mean_s * self.rng.lognormvariate(-(sigma**2) / 2, sigma)


def run(
    cluster: ModelledCluster,
    windows: Sequence[Window | int],
    lines: int,
    change: Callable[[int], object] = lambda answers: None,
) -> tuple[float, list[int]]:
    """Answer lines; return the seconds, and the number of answers for each window."""
    events: list[tuple[float, int, str, int, float, float]] = []
    waiting: deque[tuple[int, float, float]] = deque()
    numbers, open_lines, answered = count(), [0] * len(windows), [0] * len(windows)
    now_s = free_s = 0.0
    running = 0

    def send(index: int) -> None:
        nonlocal free_s
        window = windows[index]
        while open_lines[index] < (window if isinstance(window, int) else window.size):
            open_lines[index] += 1
            free_s = max(free_s, now_s) + cluster.time_s(cluster.router_s)
            heapq.heappush(events, (free_s, next(numbers), "arrives", index, now_s, 0.0))

    for index in range(len(windows)):
        send(index)
    while sum(answered) < lines:
        now_s, _, event, index, sent_s, waited_s = heapq.heappop(events)
        if event == "arrives":
            waiting.append((index, sent_s, now_s))
        else:
            running -= 1
            open_lines[index] -= 1
            answered[index] += 1
            window = windows[index]
            if not isinstance(window, int):
                known_s = waited_s if cluster.says_waits else 0.0
                window.answered(now_s, took_s=now_s - sent_s, waited_s=known_s)
            change(sum(answered))
            send(index)
        while waiting and running < cluster.places:
            first, sent_s, arrived_s = waiting.popleft()
            running += 1
            took_s = cluster.time_s(cluster.answer_s * (1 + running / cluster.batching))
            entry = (now_s + took_s, next(numbers), "ends", first, sent_s, now_s - arrived_s)
            heapq.heappush(events, entry)
    return now_s, answered


def window() -> Window:
    return Window(lambda: LIMIT)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    answer_s=st.sampled_from((0.004, 0.3, 20.0)),
    places=st.sampled_from((1, 4, 40, 300)),
    router_share=st.sampled_from((0.0, 0.01, 0.1, 1.0)),
    spread=st.sampled_from((0.0, 0.3, 1.0)),
    says_waits=st.booleans(),
)
def test_a_batch_is_as_fast_as_with_as_many_requests_as_help(
    seed: int, answer_s: float, places: int, router_share: float, spread: float, says_waits: bool
) -> None:
    """Whatever the cluster's speed and size, and whether it says that lines wait or not."""
    made = [
        ModelledCluster(
            answer_s,
            places,
            router_s=router_share * answer_s,
            spread=spread,
            says_waits=says_waits,
            rng=random.Random(seed),
        )
        for _ in range(2)
    ]
    enough = min(places, math.ceil(2 / router_share) if router_share else places) + 16
    lines = 60 * enough
    fixed_s, _ = run(made[0], [enough], lines)
    found_s, _ = run(made[1], [window()], lines)
    assert found_s < 1.2 * fixed_s


@pytest.mark.parametrize("says_waits", [True, False])
@pytest.mark.parametrize("router_s", [0.0, 1 / 60])
def test_no_more_requests_are_open_than_help(says_waits: bool, router_s: float) -> None:
    """Others wait less then. Here 60 lines a second are possible, and 60 requests are enough."""
    sizes = []
    found = window()
    cluster = ModelledCluster(places=60, router_s=router_s, says_waits=says_waits)
    run(cluster, [found], 12_000, lambda answers: sizes.append(found.size))
    assert sorted(sizes)[len(sizes) // 2] <= 4 * 64


def test_the_open_requests_double_with_each_answer_time_at_the_start() -> None:
    sizes = {}
    found = window()
    run(ModelledCluster(spread=0.0), [found], 1000, lambda n: sizes.update({n: found.size}))
    assert [sizes[START * (2**n - 1)] for n in range(1, 6)] == [START * 2**n for n in range(1, 6)]


@pytest.mark.parametrize("before", [8, 256])
def test_the_window_follows_a_cluster_that_changes(before: int) -> None:
    found, cluster = window(), ModelledCluster(places=before, spread=0.3)
    after = {8: 256, 256: 8}[before]

    def change(answers: int) -> None:
        if answers == 3000:
            cluster.places = after
        sizes.append(found.size)

    sizes: list[int] = []
    run(cluster, [found], 13_000, change)
    assert after / 2 <= sorted(sizes[-3000:])[1500] <= max(4 * after, 4 * START)


def test_batches_share_a_cluster_that_says_how_long_lines_wait() -> None:
    """None of them is starved, and their windows do not grow against each other."""
    windows = [window() for _ in range(3)]
    largest = []
    _, answered = run(
        ModelledCluster(places=64),
        windows,
        30_000,
        lambda n: largest.append(max(found.size for found in windows)),
    )
    assert min(answered) > 30_000 / 3 / 5
    assert sorted(largest)[len(largest) // 2] < LIMIT / 2


def test_many_lost_lines_halve_the_window_once() -> None:
    found = window()
    for _ in range(10):
        found.lost()
    assert found.size == START / 2


def test_the_window_keeps_a_limit_that_changes() -> None:
    limit = 5
    found = Window(lambda: limit)
    assert found.size == 5
    limit = 50
    run(ModelledCluster(), [found], 2000)
    assert found.size == 50
    limit = 3
    assert found.size == 3
