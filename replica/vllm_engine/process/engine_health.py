"""An engine is declared dead when its process is stopped or its step does not end.

Checks are counted, not seconds: a replica that was stopped together with its engine would otherwise
declare it dead when both continue.
"""

from dataclasses import dataclass

STOPPED_CHECKS = 3  # consecutive checks that find its process stopped
STUCK_CHECKS = 600  # consecutive checks in one step: five minutes, vLLM's limit for its workers


@dataclass(slots=True)
class EngineHealth:
    """The results of consecutive checks of the engine."""

    steps: int = 0
    stopped_checks: int = 0
    stuck_checks: int = 0

    def check(self, *, is_stopped: bool, has_work: bool, steps: int) -> str | None:
        """Why the engine is declared dead, or None. `steps`: all steps that it has done."""
        is_stuck = has_work and steps == self.steps
        self.steps = steps
        self.stopped_checks = self.stopped_checks + 1 if is_stopped else 0
        self.stuck_checks = self.stuck_checks + 1 if is_stuck else 0
        if self.stopped_checks >= STOPPED_CHECKS:
            return "its process is stopped"
        if self.stuck_checks >= STUCK_CHECKS:
            return "its step does not end"
        return None
