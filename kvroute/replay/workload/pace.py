"""How fast requests arrive, as a user says it.

Separate from the replay itself, so that the command line starts fast.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """At most one of the four is given; none: the trace's own speed."""

    load: float | None = None  # share of saturation
    speed: float | None = None  # multiple of the trace's own
    rate: float | None = None  # requests a second; in a closed loop, sessions started
    sessions: int | None = None  # that run at once, in a closed loop
    is_closed_loop: bool = False

    @property
    def unit(self) -> str:
        return "sessions" if self.is_closed_loop else "requests"

    def __str__(self) -> str:
        if self.sessions:
            return f"with {self.sessions} sessions at once"
        if self.load:
            return f"at {self.load:.0%} of saturation"
        if self.rate:
            return f"at {self.rate:g} {self.unit}/s"
        return f"at {self.speed or 1:g} times its own speed"
