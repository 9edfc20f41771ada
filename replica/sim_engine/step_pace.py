"""The pace of a simulated engine's steps."""

import asyncio

SHORTEST_SLEEP_S = 0.001  # minimum sleep in seconds; shorter sleeps are added to the next one
LONGEST_LAG_S = 0.05  # maximum delay in seconds that is subtracted from later sleeps


class StepPace:
    """Makes steps take the right time on average, although sleeps are inexact."""

    def __init__(self) -> None:
        self._ends_at_s = 0.0  # end of the last step, on the event loop's clock

    def restart(self) -> None:
        """Let the next step begin now."""
        self._ends_at_s = asyncio.get_running_loop().time()

    async def spend(self, step_s: float) -> None:
        """Sleep until the end of a step that takes `step_s`.

        If earlier sleeps or computations took too long, this sleep is shorter, by at most
        LONGEST_LAG_S.
        """
        now_s = asyncio.get_running_loop().time()
        self._ends_at_s = max(self._ends_at_s + step_s, now_s - LONGEST_LAG_S)
        left_s = self._ends_at_s - now_s
        await asyncio.sleep(left_s if left_s >= SHORTEST_SLEEP_S else 0)
