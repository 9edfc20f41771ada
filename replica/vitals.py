"""When an engine that still has a process is dead all the same.

Looks are counted, not seconds: whoever was stopped together with the engine would else find it
guilty on waking.
"""

from dataclasses import dataclass

STOPPED_LOOKS = 3  # that find its process stopped: nobody is going to wake it
STUCK_LOOKS = 600  # that find it at work on one step: five minutes, what vLLM gives its workers


@dataclass(slots=True)
class Vitals:
    """What looks at the engine found, one after another."""

    steps: int = 0
    stopped_looks: int = 0
    stuck_looks: int = 0

    def look(self, *, is_stopped: bool, has_work: bool, steps: int) -> str | None:
        """Why the engine counts as dead; None while it does not. `steps`: done in its life."""
        is_stuck = has_work and steps == self.steps
        self.steps = steps
        self.stopped_looks = self.stopped_looks + 1 if is_stopped else 0
        self.stuck_looks = self.stuck_looks + 1 if is_stuck else 0
        if self.stopped_looks >= STOPPED_LOOKS:
            return "its process is stopped"
        if self.stuck_looks >= STUCK_LOOKS:
            return "its step does not end"
        return None
