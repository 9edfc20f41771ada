"""In a closed loop, each turn of a session arrives so long after the answer to the turn before.

That time, in which people think and tools run, is as in the trace at any speed: the time between
two arrivals minus that of the answer between them. Where the trace does not say how long an answer
took, it is what the answer takes on an idle replica. So on an idle cluster, turns arrive as
recorded; on a busy one, later.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapreplace
from itertools import chain, pairwise

from kvroute.replay.hardware.model import EngineModel
from kvroute.replay.workload.trace import Request, TraceError, ideal_hit_tokens

Turns = Sequence[Request]  # of one session, in order


@dataclass(frozen=True, slots=True)
class FollowUp:
    """The next turn of a session."""

    index: int  # of its request
    think_s: float  # from the answer before it until its arrival


@dataclass(frozen=True, slots=True)
class Session:
    """A session of a closed loop."""

    turns: Sequence[int]  # the indices of its requests, in order
    alone_s: float  # its length on an idle replica that has every repeated block cached


@dataclass(frozen=True, slots=True)
class Loop:
    """Which requests wait for the answers to others."""

    follow_ups: Mapping[int, FollowUp] = field(default_factory=dict)  # by the request before
    sessions: Sequence[Session] = ()
    queued: Sequence[int] = ()  # first requests that each wait for the end of another session


OPEN_LOOP = Loop()  # no request waits


def native_starts_per_s(recorded: Sequence[Request]) -> float:
    """Sessions that start in a second of the trace's own time. Raises TraceError."""
    starts_s = [turns[0].arrival_s for turns in _sessions(recorded)]
    if len(starts_s) < 2:
        raise TraceError(
            "a closed loop needs requests of two sessions at least; name the session of each in "
            "its line, as `session`"
        )
    return len(starts_s) / (max(starts_s) - min(starts_s))


def starts_at_speed(
    recorded: Sequence[Request], speed: float, engine: EngineModel
) -> tuple[list[Request], Loop]:
    """Return the same sessions, starting `speed` times as fast, and who waits for whom. Each takes
    as long as before."""
    sessions = _sessions(recorded)
    moved = _moved(sessions, [turns[0].arrival_s / speed for turns in sessions])
    return _in_order(moved), _loop(moved, engine)


def starts_at_once(
    recorded: Sequence[Request], count: int, engine: EngineModel
) -> tuple[list[Request], Loop]:
    """Return the same sessions, `count` of them at a time, and who waits for whom.

    The first ones arrive at 0 s, in the trace's order. The arrival of a later one is when it would
    start on an idle cluster; a replay starts it when another session ends.
    """
    sessions = _sessions(recorded)
    free_s = [0.0] * count  # heap: when each of the sessions that run at once ends
    starts_s = []
    for session in _loop(sessions, engine).sessions:
        starts_s.append(free_s[0])
        heapreplace(free_s, free_s[0] + session.alone_s)
    moved = _moved(sessions, starts_s)
    loop = _loop(moved, engine)
    return _in_order(moved), replace(loop, queued=[each.turns[0] for each in loop.sessions[count:]])


def _loop(sessions: Sequence[Turns], engine: EngineModel) -> Loop:
    hits = ideal_hit_tokens(_in_order(sessions))

    def alone_s(turn: Request) -> float:
        return engine.alone_s(hits[turn.index], turn.input_tokens, turn.output_tokens)

    def think_s(turn: Request, then: Request) -> float:
        answer_s = alone_s(turn) if turn.answered_s is None else turn.answered_s
        return max(0.0, then.arrival_s - turn.arrival_s - answer_s)

    follow_ups: dict[int, FollowUp] = {}
    found = []
    for turns in sessions:
        later = {
            turn.index: FollowUp(then.index, think_s(turn, then)) for turn, then in pairwise(turns)
        }
        follow_ups |= later
        length_s = sum(map(alone_s, turns)) + sum(each.think_s for each in later.values())
        found.append(Session([turn.index for turn in turns], length_s))
    return Loop(follow_ups, found)


def _moved(sessions: Sequence[Turns], starts_s: Sequence[float]) -> list[list[Request]]:
    """Return the sessions with other starts, their requests numbered in the new order."""
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
    """The turns of each session, in order. A request without one is a session of its own. So is one
    that came before its session's answer had ended: agents side by side may share a name."""
    sessions: list[list[Request]] = []
    branches: dict[str, list[list[Request]]] = defaultdict(list)  # of each name
    for request in requests:
        own = branches[request.session] if request.session else []
        free = (turns for turns in own if _has_answer(turns[-1], request.arrival_s))
        turns = next(free, None)
        if turns is None:
            turns = []
            own.append(turns)
            sessions.append(turns)
        turns.append(request)
    return sessions


def _has_answer(turn: Request, at_s: float) -> bool:
    """By then; traces that do not say it have turns one after the other."""
    return turn.arrival_s + (turn.answered_s or 0.0) <= at_s
