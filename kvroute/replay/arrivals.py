"""The requests of a trace, as they arrive at a given pace."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvroute.replay.closed_loop import FollowUp, follow_ups, native_starts_per_s, starts_at_speed
from kvroute.replay.model import EngineModel
from kvroute.replay.pace import Pace
from kvroute.replay.simulate import OPEN_LOOP
from kvroute.replay.trace import Request, at_speed, native_rps


@dataclass(frozen=True, slots=True)
class Arrivals:
    requests: list[Request]
    follow_ups: Mapping[int, FollowUp]  # by the index of the request before
    rate: float  # requests a second; in a closed loop, sessions started
    speed: float  # that rate, as a multiple of the trace's own


def arrivals_at(
    pace: Pace,
    recorded: Sequence[Request],
    engine: EngineModel,
    saturation_rps: Callable[[], float],
) -> Arrivals:
    """The trace's requests at that pace; the saturation is asked for only if it needs it. Raises
    TraceError."""
    native = native_starts_per_s(recorded) if pace.is_closed_loop else native_rps(recorded)
    rate = pace.load * saturation_rps() if pace.load else pace.rate or (pace.speed or 1.0) * native
    if not pace.is_closed_loop:
        return Arrivals(at_speed(recorded, rate / native), OPEN_LOOP, rate, rate / native)
    requests = starts_at_speed(recorded, rate / native)
    return Arrivals(requests, follow_ups(requests, engine), rate, rate / native)
