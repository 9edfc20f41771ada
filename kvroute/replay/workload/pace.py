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
