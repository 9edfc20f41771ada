"""Closed loops: each turn of a session arrives some time after the previous turn was answered.

During this thinking time, people think and tools run. It does not depend on the speed of the
replay: it is the recorded time between two arrivals minus the duration of the answer between them.
If the trace has no durations, the duration on an idle replica is used. So turns arrive as recorded
if the cluster is idle, and later if it is busy.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapreplace
from itertools import chain, pairwise

from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.workload.trace import Request, TraceError, ideal_hit_tokens

Turns = Sequence[Request]  # the requests of one session, in order


@dataclass(frozen=True, slots=True)
class FollowUp:
    """The next turn of a session."""

    index: int  # index of the next turn's request
    think_s: float  # seconds between the end of the previous answer and this turn's arrival


@dataclass(frozen=True, slots=True)
class ClosedLoopSession:
    """A session of a closed loop."""

    turns: Sequence[int]  # indices of the session's requests, in order
    alone_s: float  # duration on an idle replica whose cache never evicts a block


@dataclass(frozen=True, slots=True)
class Loop:
    """Says which requests wait for answers to other requests."""

    # Index of a request -> the next turn of its session.
    follow_ups: Mapping[int, FollowUp] = field(default_factory=dict)
    sessions: Sequence[ClosedLoopSession] = ()
    queued: Sequence[int] = ()  # first turns of sessions that wait until another session ends


OPEN_LOOP = Loop()  # no request waits for an answer


def native_starts_per_s(recorded: Sequence[Request]) -> float:
    """Return how many sessions start per second in the recorded trace.

    Raises:
        TraceError: The trace has fewer than two sessions.
    """
    starts_s = [turns[0].arrival_s for turns in _sessions(recorded)]
    if len(starts_s) < 2:
        raise TraceError(
            "a closed loop needs requests of at least two sessions; add the field `session` to "
            "each line of the trace"
        )
    return len(starts_s) / (max(starts_s) - min(starts_s))


def starts_at_speed(
    recorded: Sequence[Request], speed: float, engine: EngineModel
) -> tuple[list[Request], Loop]:
    """Return the requests and the loop if sessions start at `speed` times the recorded rate.

    The thinking times within each session stay the same.
    """
    sessions = _sessions(recorded)
    moved = _moved(sessions, [turns[0].arrival_s / speed for turns in sessions])
    return _in_order(moved), _loop(moved, engine)


def starts_at_once(
    recorded: Sequence[Request], count: int, engine: EngineModel
) -> tuple[list[Request], Loop]:
    """Return the requests and the loop if `count` sessions run at any time.

    The first `count` sessions of the trace arrive at 0 s. The replay starts each later session when
    another one ends. The arrival times in its requests are those on an idle cluster; the replay
    does not use them, but the requests are numbered in their order.
    """
    sessions = _sessions(recorded)
    free_s = [0.0] * count  # heap of the times at which running sessions end
    starts_s = []
    for session in _loop(sessions, engine).sessions:
        starts_s.append(free_s[0])
        heapreplace(free_s, free_s[0] + session.alone_s)
    moved = _moved(sessions, starts_s)
    loop = _loop(moved, engine)
    return _in_order(moved), replace(
        loop, queued=[session.turns[0] for session in loop.sessions[count:]]
    )


def _loop(sessions: Sequence[Turns], engine: EngineModel) -> Loop:
    """Return the follow-ups and the sessions, with durations on an idle replica of this engine."""
    hits = ideal_hit_tokens(_in_order(sessions))

    def alone_s(turn: Request) -> float:
        return engine.alone_s(hits[turn.index], turn.input_tokens, turn.output_tokens)

    def think_s(turn: Request, next_turn: Request) -> float:
        answer_s = alone_s(turn) if turn.answered_s is None else turn.answered_s
        return max(0.0, next_turn.arrival_s - turn.arrival_s - answer_s)

    follow_ups: dict[int, FollowUp] = {}
    closed_sessions = []
    for turns in sessions:
        later = {
            turn.index: FollowUp(next_turn.index, think_s(turn, next_turn))
            for turn, next_turn in pairwise(turns)
        }
        follow_ups |= later
        length_s = sum(map(alone_s, turns)) + sum(turn.think_s for turn in later.values())
        closed_sessions.append(ClosedLoopSession([turn.index for turn in turns], length_s))
    return Loop(follow_ups, closed_sessions)


def _moved(sessions: Sequence[Turns], starts_s: Sequence[float]) -> list[list[Request]]:
    """Return the sessions with new start times, their requests numbered in order of arrival."""
    moved = [
        [replace(turn, arrival_s=start_s + turn.arrival_s - turns[0].arrival_s) for turn in turns]
        for turns, start_s in zip(sessions, starts_s, strict=True)
    ]
    by_arrival = sorted(chain.from_iterable(moved), key=lambda turn: turn.arrival_s)
    numbers = {turn.index: number for number, turn in enumerate(by_arrival)}
    return [[replace(turn, index=numbers[turn.index]) for turn in turns] for turns in moved]


def _in_order(sessions: Sequence[Turns]) -> list[Request]:
    return sorted(chain.from_iterable(sessions), key=lambda turn: turn.index)


def _sessions(requests: Iterable[Request]) -> list[list[Request]]:
    """Return the turns of each session in order.

    A request without a session's name is a session of its own. Parallel agents may share a name. So
    a request that arrived before the previous turn of its name was answered starts a new session.
    """
    sessions: list[list[Request]] = []
    branches: dict[str, list[list[Request]]] = defaultdict(list)  # name -> sessions of this name
    for request in requests:
        same_name = branches[request.session] if request.session else []
        free = (turns for turns in same_name if _has_answer(turns[-1], request.arrival_s))
        turns = next(free, None)
        if turns is None:
            turns = []
            same_name.append(turns)
            sessions.append(turns)
        turns.append(request)
    return sessions


def _has_answer(turn: Request, at_s: float) -> bool:
    """Return whether the turn's answer had ended at a time; assume so if it has no duration."""
    return turn.arrival_s + (turn.answered_s or 0.0) <= at_s
