"""The policy benchmark covers what it says, and compares with the rival that is best."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest

from kvroute.replay.hardware.profiles import PROFILES
from kvroute.replay.workload.trace import Request
from tests.bench.matrix.__main__ import matches
from tests.bench.matrix.cells import CACHES, CELLS, COVER, SLOW_SPEED, Cell
from tests.bench.matrix.runs import Result, cluster, measure
from tests.bench.matrix.table import compared, compared_sessions
from tests.bench.matrix.workloads import moved
from tests.support.traces import agents

SMALL = Cell(
    trace="agents", engine="h200-8b", rate=2.0, cache="ample", replicas=2, limit=100, is_slow=True
)


def columns(cell: Cell) -> list[object]:
    """Return the values of a cell that vary in the cover."""
    trace = (cell.trace, cell.is_closed)
    return [trace, cell.engine, cell.load, cell.cache, cell.is_slow, cell.routers]


def test_every_two_values_of_two_columns_meet_in_a_cell() -> None:
    rows = [columns(cell) for cell in COVER]
    for one, other in combinations(range(6), 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(product({row[one] for row in rows}, {row[other] for row in rows}))
    assert {cell.load for cell in COVER} == {0.5, 0.8, 0.95, 1.3}
    assert len(rows) < 640 / 20


def test_every_cell_has_a_name_of_its_own_and_a_known_engine() -> None:
    names = [str(cell) for cell in CELLS]
    assert len(set(names)) == len(names)
    assert {cell.engine for cell in CELLS} <= set(PROFILES)


def test_several_seeds_run_near_saturation() -> None:
    assert len(replace(SMALL, rate=None, load=0.8).seeds) == 1
    assert len(replace(SMALL, rate=None, load=0.95).seeds) == 3


def test_a_filter_names_words_of_a_cell() -> None:
    name = "agents h200-8b 95% tight 4 routers"
    assert matches(name, [])
    assert matches(name, ["conversation", "95% agents"])
    assert not matches(name, ["agents 80%"])
    assert not matches(name, ["agent"])


def result(cell: str, policy: str, p90_s: float, seed: int = 0, hits: float = 0.5) -> Result:
    """Return a result in which only the p90, and the hits, differ from others."""
    return Result(cell, policy, seed, 1.0, p90_s, 9.0, hits, 4.0, 0.5, *[None] * 4)


def test_a_cell_is_compared_with_its_best_rival_over_all_seeds() -> None:
    results = [
        *(result("fine", "kvroute", p90_s, seed) for seed, p90_s in enumerate([1.0, 3.0])),
        *(result("fine", "llm-d", p90_s, seed) for seed, p90_s in enumerate([3.0, 5.0])),
        *(result("fine", "sglang", 8.0, seed, hits=0.6) for seed in range(2)),
        *(result("bad", policy, p90_s) for policy, p90_s in (("kvroute", 6.0), ("llm-d", 2.0))),
    ]
    bad, fine = compared(results, ["kvroute"])
    assert (bad["cell"], bad["worst"], bad["p90 ratio"]) == ("bad", 3.0, 3.0)
    assert (fine["cell"], fine["worst"], fine["p90 ratio"]) == ("fine", 1.0, 0.5)
    assert (fine["TTFT p90"], fine["best p90"]) == (2.0, "llm-d")
    assert fine["more hits"] == pytest.approx(-0.1)
    assert compared_sessions(results, ["kvroute"]) == []


def test_where_sessions_run_at_once_turns_are_compared() -> None:
    def sessions(policy: str, turns: float, slowdown: float) -> Result:
        own = result("70 sessions", policy, 1.0)
        return replace(
            own,
            turns_per_min=turns,
            slowdown_p50=1.0,
            slowdown_p90=slowdown,
            slowdown_p99=2 * slowdown,
        )

    results = [sessions("kvroute", 68.0, 2.0), sessions("llm-d", 34.0, 8.0)]
    (row,) = compared_sessions(results, ["kvroute"])
    assert (row["turns ratio"], row["worst"], row["p99 ratio"]) == (2.0, 0.5, 0.25)
    assert compared(results, ["kvroute"]) == []


def pauses_s(requests: list[Request]) -> dict[str, list[float]]:
    """Return each session's arrivals, from its first one."""
    found: dict[str, list[float]] = {}
    for request in requests:
        found.setdefault(str(request.session), []).append(request.arrival_s)
    return {name: [at_s - times_s[0] for at_s in times_s] for name, times_s in found.items()}


def test_another_seed_moves_sessions_as_a_whole() -> None:
    requests = agents(0, sessions=20)
    assert moved(requests, 0) == requests
    later = list(moved(requests, 1))
    assert [each.index for each in later] == list(range(len(requests)))
    assert [each.arrival_s for each in later] == sorted(each.arrival_s for each in later)
    assert [each.session for each in later] != [request.session for request in requests]
    before = pauses_s(requests)
    for name, times_s in pauses_s(later).items():
        assert times_s == pytest.approx(before[name])


def test_caches_are_shares_of_what_a_trace_holds() -> None:
    requests = agents(0, sessions=50)
    tokens = 512 * len({block for request in requests for block in request.blocks})
    ample = cluster(replace(SMALL, is_slow=False), requests)
    assert 2 * ample.kv_tokens == pytest.approx(CACHES["ample"] * tokens, rel=0.01)
    assert ample.speeds == [1.0, 1.0]
    few = cluster(replace(SMALL, replicas=1000), requests)  # each holds two prompts at least
    assert few.kv_tokens >= 2 * max(request.input_tokens for request in requests)
    assert set(few.speeds) == {1.0, SLOW_SPEED}
    assert cluster(replace(SMALL, cache=400_000), requests).kv_tokens == 400_000


def shapes() -> Iterator[tuple[str, Cell]]:
    yield "agents h200-8b 2/s ample slow 2 replicas", SMALL
    yield (
        "agents-closed h200-8b 5 sessions 800k 2 replicas",
        replace(SMALL, rate=None, sessions=5, cache=800_000, is_closed=True, is_slow=False),
    )
    yield (
        "agents-closed h200-8b 80% ample 2 replicas",
        replace(SMALL, rate=None, load=0.8, is_closed=True, is_slow=False),
    )


@pytest.mark.parametrize(("name", "cell"), [*shapes()])
def test_a_cell_is_run_and_gives_the_same_result_again(name: str, cell: Cell) -> None:
    saturations = {str(cell.at_saturation): 4.0}
    first, second = (measure(cell, "sglang", 1, {}, saturations) for _ in range(2))
    assert first == second
    assert first.cell == str(cell) == name
    assert 0 < first.ttft_p50_s <= first.ttft_p90_s <= first.ttft_p99_s
    assert (first.turns_per_min is None) == (cell.sessions is None)
