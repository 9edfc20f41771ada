"""Asks whatever runs a model's replicas how many there should be, and in which states they are."""

import asyncio
import time
from collections.abc import Callable

from kvroute.router.connections.replica_source import Deployed, NoReplicaError

FRESH_S = 0.5  # an answer up to this age is used again
WAIT_S = 1.0  # longest wait for an answer; what is slow or hangs delays nobody longer


class DeployedReplicas:
    """Asks when somebody wants to know, and only once at a time.

    Args:
        read: asks, as ReplicaSource.deployed does; runs in a thread.
    """

    def __init__(self, read: Callable[[], Deployed]) -> None:
        self._read = read
        self._last: Deployed | None = None
        self._asked_s = self._answered_s = -FRESH_S  # times of the last question and answer
        self._asking: asyncio.Task[None] | None = None

    async def get(self) -> Deployed | None:
        """Return the answer, or the last one if it is late; None if nobody answers."""
        if self._asking is None and time.monotonic() - self._answered_s > FRESH_S:
            self._asked_s = time.monotonic()
            self._asking = asyncio.create_task(self._ask(), name="ask for the replicas")
        if self._asking:
            left_s = self._asked_s + WAIT_S - time.monotonic()
            await asyncio.wait([self._asking], timeout=max(0.0, left_s))
        return self._last

    async def _ask(self) -> None:
        try:
            self._last = await asyncio.to_thread(self._read)
        except NoReplicaError:
            self._last = None
        finally:
            self._answered_s, self._asking = time.monotonic(), None
