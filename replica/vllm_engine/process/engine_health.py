"""Declares an engine dead if its process is stopped or if its step does not end.

This counts checks and not seconds. With seconds, a replica that was stopped together with its
engine would declare the engine dead as soon as both continue.
"""

from dataclasses import dataclass

STOPPED_CHECKS = 3  # consecutive checks with a stopped process after which the engine is dead
# Consecutive checks within one step after which the engine is dead. This is five minutes, which is
# also vLLM's limit for its workers.
STUCK_CHECKS = 600


@dataclass(slots=True)
class EngineHealth:
    """The results of consecutive checks of the engine."""

    steps: int = 0
    stopped_checks: int = 0
    stuck_checks: int = 0

    def check(self, *, is_stopped: bool, has_work: bool, steps: int) -> str | None:
        """Record a check; return why the engine is declared dead, or None if it is not.

        Args:
            is_stopped: Whether the engine's process is stopped.
            has_work: Whether the engine has unfinished requests.
            steps: The number of all steps that the engine has done.
        """
        is_stuck = has_work and steps == self.steps
        self.steps = steps
        self.stopped_checks = self.stopped_checks + 1 if is_stopped else 0
        self.stuck_checks = self.stuck_checks + 1 if is_stuck else 0
        if self.stopped_checks >= STOPPED_CHECKS:
            return "its process is stopped"
        if self.stuck_checks >= STUCK_CHECKS:
            return "its step does not end"
        return None
