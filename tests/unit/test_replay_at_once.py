"""A fixed number of sessions runs at once, and a replay reports their durations."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.progress import Progress
from typer.testing import CliRunner

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.cli import app
from kvroute.replay.compare import PolicyRun, compare
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.simulate import Cluster, Outcome, simulate
from kvroute.replay.summary import SessionTimes, session_times
from kvroute.replay.workload.closed_loop import (
    ClosedLoopSession,
    Loop,
    starts_at_once,
    starts_at_speed,
)
from kvroute.replay.workload.trace import BLOCK_TOKENS, Request
from tests.support.traces import lines, rollouts

ENGINE = EngineModel()
ROOM = Cluster(2, 1_000_000)


def turn(
    index: int, session: str, at_s: float, blocks: int = 1, answered_s: float | None = None
) -> Request:
    """Return a prompt of the session's first blocks and 9 tokens, with an answer of 20 tokens."""
    start = sum(map(ord, session)) * 1000
    chain = tuple(Fingerprint(start + n) for n in range(1, blocks + 1))
    tokens = blocks * BLOCK_TOKENS + 9
    return Request(index, at_s, tokens, 20, chain, session=session, answered_s=answered_s)


def recorded(sessions: int = 6, turns: int = 4, pause_s: float = 5.0) -> list[Request]:
    """Return sessions that start one after the other, with turns after equal pauses."""
    coming = [
        turn(0, f"session {n}", n + pause_s * number, blocks=3 * number + 1)
        for n in range(sessions)
        for number in range(turns)
    ]
    coming.sort(key=lambda each: each.arrival_s)
    return [
        turn(index, str(each.session), each.arrival_s, len(each.blocks))
        for index, each in enumerate(coming)
    ]


def replayed(requests: list[Request], loop: Loop, cluster: Cluster = ROOM) -> Outcome:
    return simulate(
        requests, cluster, "least-loaded", follow_ups=loop.follow_ups, queued=loop.queued
    )


def active(loop: Loop, outcome: Outcome, at_s: float) -> int:
    """Return how many sessions have started and not ended."""
    return sum(
        outcome.arrival_s[session.turns[0]] <= at_s < outcome.finished_s[session.turns[-1]]
        for session in loop.sessions
    )


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_number_of_sessions_stays_until_none_is_left_to_start(count: int) -> None:
    requests, loop = starts_at_once(recorded(), count, ENGINE)
    outcome = replayed(requests, loop)
    last_start_s = max(outcome.arrival_s[session.turns[0]] for session in loop.sessions)
    for at_s in (0.1, last_start_s / 3, last_start_s / 2, last_start_s):
        assert active(loop, outcome, at_s) == count


def test_the_next_session_starts_when_one_ends_in_the_order_of_the_trace() -> None:
    requests, loop = starts_at_once(recorded(), 2, ENGINE)
    outcome = replayed(requests, loop)
    ends_s = sorted(outcome.finished_s[session.turns[-1]] for session in loop.sessions)
    starts_s = [outcome.arrival_s[session.turns[0]] for session in loop.sessions]
    assert starts_s == [0.0, 0.0, *ends_s[:4]]
    names = [requests[session.turns[0]].session for session in loop.sessions]
    assert names == [f"session {n}" for n in range(6)]


def test_turns_keep_their_order_and_their_think_times() -> None:
    requests, loop = starts_at_once(recorded(), 2, ENGINE)
    _, as_recorded = starts_at_speed(recorded(), 1.0, ENGINE)

    def think_s(loop: Loop) -> list[list[float]]:
        return [
            [loop.follow_ups[index].think_s for index in session.turns[:-1]]
            for session in loop.sessions
        ]

    for ours, theirs in zip(think_s(loop), think_s(as_recorded), strict=True):
        assert ours == pytest.approx(theirs)
    outcome = replayed(requests, loop)
    for before, then in loop.follow_ups.items():
        assert outcome.arrival_s[then.index] == outcome.finished_s[before] + then.think_s
        assert requests[then.index].session == requests[before].session


def test_all_sessions_start_at_once_if_there_are_fewer() -> None:
    requests, loop = starts_at_once(recorded(), 100, ENGINE)
    outcome = replayed(requests, loop)
    assert [outcome.arrival_s[session.turns[0]] for session in loop.sessions] == [0.0] * 6


@pytest.mark.parametrize("speed", [0.01, 100.0])
def test_parallel_agents_stay_separate_sessions_at_any_speed(speed: float) -> None:
    """The second agent's first turn arrives before the first agent's answer has ended."""
    names = [turn(n, "a", at_s, answered_s=5.0) for n, at_s in enumerate([0.0, 1.0, 10.0, 11.0])]
    apart = [*names, turn(4, "b", 100.0, answered_s=1.0)]
    for requests, loop in (
        starts_at_speed(apart, speed, ENGINE),
        starts_at_once(apart, 1, ENGINE),
    ):
        turns = [[requests[n].session for n in session.turns] for session in loop.sessions]
        assert turns == [["a", "a"], ["a", "a"], ["b"]]


def outcome_of(times_s: list[tuple[float, float]]) -> Outcome:
    """Return an outcome with these arrivals and ends."""
    none = [0.0] * len(times_s)
    return Outcome(
        arrival_s=[arrival_s for arrival_s, _ in times_s],
        first_token_s=none,
        finished_s=[end_s for _, end_s in times_s],
        hit_tokens=[],
        prefill_s=[],
        reloaded_tokens=[],
        disk_tokens=[],
        reload_wait_s=none,
        reload_s=[],
        pulled_tokens=[],
    )


def test_the_figures_of_sessions_equal_those_computed_by_hand() -> None:
    sessions = [
        ClosedLoopSession([0, 2], 10.0),
        ClosedLoopSession([1], 20.0),
        ClosedLoopSession([3, 4], 5.0),
    ]
    outcome = outcome_of([(0.0, 5.0), (0.0, 40.0), (10.0, 20.0), (20.0, 25.0), (30.0, 50.0)])
    assert asdict(session_times(Loop(sessions=sessions), outcome)) == pytest.approx(
        {
            "sessions": 3,
            "session_mean_s": 30.0,  # 20, 40 and 30
            "session_p50_s": 30.0,
            "session_p90_s": 38.0,
            "slowdown_p50": 2.0,  # 2, 2 and 6
            "slowdown_p90": 5.2,
            "slowdown_p99": 5.92,
            "turns_per_min": 60 * 2 / 20,  # the last session starts at 20 s, and one ends then
            "most_sessions_s": 48.0,
        }
    )
    assert session_times(Loop(), outcome) == SessionTimes()


def test_a_session_that_runs_alone_has_no_slowdown() -> None:
    requests, loop = starts_at_once(recorded(sessions=3), 1, ENGINE)
    times = session_times(loop, replayed(requests, loop))
    assert times.slowdown_p50 == pytest.approx(1.0, abs=0.01)


@pytest.fixture(scope="module")
def made() -> list[Request]:
    return rollouts(0, sessions=12)


@pytest.fixture(scope="module")
def runs(made: list[Request]) -> tuple[list[Request], Loop, list[PolicyRun]]:
    requests, loop = starts_at_once(made, 5, ENGINE)
    with Progress(disable=True) as progress:
        names = ["kvroute", "consistent-hash"]
        return requests, loop, compare(names, requests, ROOM, seed=0, progress=progress, loop=loop)


@pytest.fixture
def trace(made: list[Request], tmp_path: Path) -> Path:
    path = tmp_path / "sessions.jsonl"
    path.write_text("\n".join(lines(made)) + "\n")
    return path


def test_the_command_runs_a_number_of_sessions_at_once(trace: Path) -> None:
    options = ["--closed-loop", "--sessions", "5", "--replicas", "2"]
    result = CliRunner().invoke(app, ["replay", str(trace), "--json", *options])
    assert "12 sessions, 5 of them at once" in " ".join(result.stderr.split())
    (row,) = json.loads(result.stdout)
    assert row["sessions"] == 12
    assert row["session_p50_s"] <= row["session_p90_s"] <= row["most_sessions_s"]
    assert 0.99 < row["slowdown_p50"] <= row["slowdown_p90"] <= row["slowdown_p99"]
    assert row["turns_per_min"] > 0


def test_only_closed_loops_have_a_table_of_sessions(trace: Path) -> None:
    options = ["--replicas", "2", "--speed", "1"]
    shown = CliRunner().invoke(app, ["replay", str(trace), *options])
    assert "/min" not in shown.stdout
    shown = CliRunner().invoke(app, ["replay", str(trace), "--closed-loop", *options])
    assert re.search(r"mean, s +p50, s +p90, s +after, s", shown.stdout)
