"""Sets the arrival times of a trace's requests for a pace, such as a load or a speed (pace.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.workload.closed_loop import (
    OPEN_LOOP,
    Loop,
    native_starts_per_s,
    starts_at_once,
    starts_at_speed,
)
from kvroute.replay.workload.pace import Pace
from kvroute.replay.workload.trace import Request, at_speed, native_rps


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests with their arrival times."""

    requests: list[Request]
    loop: Loop  # which of the requests wait for answers to other requests
    summary: str  # description of the pace, for the terminal


def arrivals_at(
    pace: Pace,
    recorded: Sequence[Request],
    engine: EngineModel,
    saturation_rps: Callable[[], float],
) -> Arrivals:
    """Return the requests of a trace with arrival times for a pace.

    Args:
        pace: The pace.
        recorded: The requests of the trace with their recorded arrival times.
        engine: Engine that determines the duration of an answer if the trace does not have it.
        saturation_rps: Computes the saturation; called only if the pace depends on it.

    Raises:
        TraceError: The trace cannot be replayed at this pace.
    """
    native = native_starts_per_s(recorded) if pace.is_closed_loop else native_rps(recorded)
    if pace.sessions is not None:
        requests, loop = starts_at_once(recorded, pace.sessions, engine)
        count = len(loop.sessions)
        summary = f"{count} sessions, {min(count, pace.sessions)} of them at once"
        return Arrivals(requests, loop, summary)
    if pace.load:
        saturation = saturation_rps()
        rate = pace.load * saturation
        relation = f"{pace.load:.0%} of saturation ({saturation:.2f}/s)"
    else:
        rate = pace.rate or (pace.speed or 1.0) * native
        relation = f"{rate / native:.2f} x the trace's"
    summary = f"{rate:.2f} {pace.unit}/s = {relation}"
    if not pace.is_closed_loop:
        return Arrivals(at_speed(recorded, rate / native), OPEN_LOOP, summary)
    requests, loop = starts_at_speed(recorded, rate / native, engine)
    return Arrivals(requests, loop, summary)
