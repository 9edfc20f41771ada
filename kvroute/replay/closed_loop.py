"""In a closed loop, each turn of a session arrives so long after the answer to the turn before.

That time, in which people think and tools run, is as in the trace at any speed: the time between
two arrivals minus that of the answer between them. Where the trace does not say how long an answer
took, it is what the answer takes on an idle replica. So on an idle cluster, turns arrive as
recorded; on a busy one, later.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvroute.replay.model import EngineModel
from kvroute.replay.trace import Request, TraceError, ideal_hit_tokens


@dataclass(frozen=True, slots=True)
class FollowUp:
    """The next turn of a session."""

    index: int  # of its request
    think_s: float  # from the answer before it until its arrival


def follow_ups(requests: Sequence[Request], engine: EngineModel) -> dict[int, FollowUp]:
    """The index of each request that has a next turn, and that turn."""
    hits = ideal_hit_tokens(requests)

    def answer_s(turn: Request) -> float:
        if turn.answered_s is not None:
            return turn.answered_s
        return engine.alone_s(hits[turn.index], turn.input_tokens, turn.output_tokens)

    return {
        turn.index: FollowUp(then.index, max(0.0, then.arrival_s - turn.arrival_s - answer_s(turn)))
        for turns in _sessions(requests).values()
        for turn, then in pairwise(turns)
    }


def native_starts_per_s(recorded: Sequence[Request]) -> float:
    """Sessions that start in a second of the trace's own time. Raises TraceError."""
    starts_s = [turns[0].arrival_s for turns in _sessions(recorded).values()]
    if len(starts_s) < 2:
        raise TraceError(
            "a closed loop needs requests of two sessions at least; name the session of each in "
            "its line, as `session`"
        )
    return len(starts_s) / (max(starts_s) - min(starts_s))


def starts_at_speed(recorded: Sequence[Request], speed: float) -> list[Request]:
    """The same sessions, starting `speed` times as fast; each takes as long as before."""
    moved = [
        replace(turn, arrival_s=turns[0].arrival_s / speed + turn.arrival_s - turns[0].arrival_s)
        for turns in _sessions(recorded).values()
        for turn in turns
    ]
    moved.sort(key=lambda turn: turn.arrival_s)
    return [replace(turn, index=index) for index, turn in enumerate(moved)]


def _sessions(requests: Iterable[Request]) -> Mapping[str, list[Request]]:
    """The turns of each session, in order. A request without one is a session of its own. So is one
    that came before its session's answer had ended: agents side by side may share a name."""
    sessions: dict[str, list[Request]] = {}
    branches: dict[str, list[str]] = defaultdict(list)  # of each name
    for request in requests:
        own = branches[request.session] if request.session else []
        free = (each for each in own if _has_answer(sessions[each][-1], request.arrival_s))
        name = next(free, None) or f"{request.session} {request.index}"
        if name not in sessions:
            own.append(name)
            sessions[name] = []
        sessions[name].append(request)
    return sessions


def _has_answer(turn: Request, at_s: float) -> bool:
    """By then; traces that do not say it have turns one after the other."""
    return turn.arrival_s + (turn.answered_s or 0.0) <= at_s
