"""The pace of a replay's arrivals, from the command line.

This module has no heavy imports, so that the command line starts fast.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace. At most one of the first four fields is set; if none is, it is as recorded."""

    load: float | None = None  # arrival rate as a share of saturation
    speed: float | None = None  # arrival rate as a multiple of the recorded rate
    rate: float | None = None  # requests per second; in a closed loop, started sessions per second
    sessions: int | None = None  # number of sessions that run at once, in a closed loop
    is_closed_loop: bool = False

    @property
    def is_as_recorded(self) -> bool:
        """Return whether the requests, or the sessions of a closed loop, arrive as in the trace."""
        return not any((self.load, self.speed, self.rate, self.sessions))

    @property
    def unit(self) -> str:
        """Return the unit of `rate` for the terminal: what it counts per second."""
        return "sessions" if self.is_closed_loop else "requests"
