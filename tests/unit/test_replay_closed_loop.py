"""In a closed loop, a turn waits for the earlier answer, then pauses as in the trace."""

import json
import math
import operator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.cli import app
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.simulate import Cluster, Outcome, simulate
from kvroute.replay.workload.closed_loop import Loop, native_starts_per_s, starts_at_speed
from kvroute.replay.workload.trace import BLOCK_TOKENS, Request, TraceError, read
from tests.support.traces import agents

ENGINE = EngineModel()


def turn(
    index: int, session: str | None, at_s: float, blocks: int = 1, answered_s: float | None = None
) -> Request:
    """Return a prompt of the session's first blocks and 9 tokens, with an answer of 20 tokens."""
    start = sum(map(ord, session or "")) * 1000
    chain = tuple(Fingerprint(start + n) for n in range(1, blocks + 1))
    tokens = blocks * BLOCK_TOKENS + 9
    return Request(index, at_s, tokens, 20, chain, session=session, answered_s=answered_s)


def replayed(requests: list[Request], cluster: Cluster) -> Outcome:
    return simulate(requests, cluster, "kvroute", follow_ups=loop_of(requests).follow_ups)


def loop_of(requests: list[Request]) -> Loop:
    """Return the dependencies of requests at the trace's own speed."""
    return starts_at_speed(requests, 1.0, ENGINE)[1]


def test_on_an_idle_cluster_turns_arrive_as_recorded() -> None:
    requests = [turn(n, "a", 10.0 * n, blocks=5 * n + 1) for n in range(5)]
    outcome = replayed(requests, Cluster(1, 100_000))
    assert outcome.arrival_s == pytest.approx([0.0, 10.0, 20.0, 30.0, 40.0])


def test_a_turn_arrives_later_if_the_earlier_answer_is_late() -> None:
    long = Request(0, 0.0, 100_000, 1, ())  # takes about 10 s
    requests = [long, turn(1, "a", 0.1), turn(2, "a", 5.1)]
    outcome = replayed(requests, Cluster(1, 200_000))
    think_s = loop_of(requests).follow_ups[1].think_s
    assert 4.5 < think_s < 5.0
    assert outcome.finished_s[1] > 5.1
    assert outcome.arrival_s[2] == pytest.approx(outcome.finished_s[1] + think_s)


def test_the_duration_of_a_recorded_answer_is_no_thinking_time() -> None:
    requests = [turn(0, "a", 0.0, answered_s=7.0), turn(1, "a", 10.0, answered_s=9.0)]
    assert loop_of(requests).follow_ups[0].think_s == pytest.approx(3.0)
    beside = [turn(0, "a", 0.0, answered_s=12.0), turn(1, "a", 10.0), turn(2, "a", 13.0)]
    assert {before: each.index for before, each in loop_of(beside).follow_ups.items()} == {0: 2}


def test_speed_moves_the_starts_of_sessions_and_nothing_else() -> None:
    recorded = [turn(0, "a", 0.0), turn(1, "b", 30.0), turn(2, "a", 40.0), turn(3, "b", 50.0)]
    faster, _ = starts_at_speed(recorded, 3.0, ENGINE)
    assert [each.index for each in faster] == [0, 1, 2, 3]
    assert [(each.session, each.arrival_s) for each in faster] == [
        ("a", 0.0),
        ("b", 10.0),
        ("b", 30.0),
        ("a", 40.0),
    ]
    assert native_starts_per_s(recorded) == pytest.approx(2 / 30)


def test_requests_without_a_session_have_no_next_turn() -> None:
    assert loop_of([turn(0, None, 0.0), turn(1, None, 1.0)]).follow_ups == {}


def test_a_closed_loop_needs_two_sessions() -> None:
    with pytest.raises(TraceError, match="at least two sessions"):
        native_starts_per_s([turn(0, "a", 0.0), turn(1, "a", 1.0)])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.jsonl"
    rows = [
        {
            "timestamp": 2000 * n,
            "input_length": 600 + n,
            "output_length": 5,
            "hash_ids": [n % 4, 10 + n],
            "session": n % 4,
            "ret": 1,
        }
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_keeps_its_sessions(trace: Path) -> None:
    requests = read(trace, limit=None, seed=0)
    assert [request.session for request in requests[:5]] == ["0", "1", "2", "3", "0"]


@pytest.mark.parametrize("pace", [["--rate", "2"], ["--speed", "3"], []])
def test_the_command_replays_sessions(trace: Path, pace: list[str]) -> None:
    options = ["--closed-loop", "--replicas", "2", "--policy", "kvroute,dynamo", *pace]
    result = CliRunner().invoke(app, ["replay", str(trace), "--json", *options])
    assert result.exit_code == 0
    assert "sessions/s" in result.stderr
    assert [row["policy"] for row in json.loads(result.stdout)] == ["kvroute", "dynamo"]


@pytest.mark.parametrize("policy", ["kvroute", "dynamo-wspt", "llm-d", "llm-d-requests", "lmetric"])
def test_equal_arguments_give_equal_outcomes(policy: str) -> None:
    requests, loop = starts_at_speed(agents(0, sessions=60), 20.0, ENGINE)
    cluster = Cluster(4, 400_000, routers=2, share_delay_s=math.inf, slow_share=0.5, slow_speed=0.5)
    first, second = (
        simulate(requests, cluster, policy, follow_ups=loop.follow_ups) for _ in range(2)
    )
    assert first == second
    assert all(map(operator.lt, first.arrival_s, first.first_token_s))
