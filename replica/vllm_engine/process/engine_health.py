"""Declares an engine dead if its process is stopped, or if a step does not end.

Time is counted in checks, not in seconds. If replica and engine are stopped together and continue
later, many seconds have passed, but there were no checks. So the engine is not declared dead.
"""

from dataclasses import dataclass

# Number of consecutive checks with a stopped process (SIGSTOP) after which the engine is declared
# dead.
STOPPED_CHECKS = 3
# Number of consecutive checks during one step after which the engine is declared dead. With two
# checks per second (engine_server.py), these are five minutes, vLLM's own limit for workers, too.
STUCK_CHECKS = 600


@dataclass(slots=True)
class EngineHealth:
    """Counts consecutive failed checks of an engine."""

    steps: int = 0  # number of steps that the engine had done at the last check
    stopped_checks: int = 0  # consecutive checks at which the process was stopped
    stuck_checks: int = 0  # consecutive checks without progress

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
