"""The cluster into which faults are injected."""

import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass

import psutil
import redis.asyncio as redis

from tests.support.redis_server import Wired


@dataclass(frozen=True)
class Victim:
    """A cluster, its Redis, and a random generator for choices."""

    wired: Wired
    replicas: int
    rng: random.Random

    @property
    def url(self) -> str:
        return self.wired.cluster.url

    @property
    def redis(self) -> "redis.Redis":
        return redis.Redis(port=self.wired.port)

    def processes(self, title: str) -> list[psutil.Process]:
        """Return the cluster's processes whose title or name contains this."""
        return self.wired.cluster.titled(title)

    def memory_bytes(self) -> int:
        """Return the unshared memory of all routers and replicas together."""
        own_bytes = 0
        for process in self.processes("kvroute:Router") + self.processes("kvroute:Replica"):
            with suppress(psutil.Error):
                own_bytes += process.memory_full_info().uss
        return own_bytes

    def any_of(self, title: str) -> psutil.Process:
        """Return a random process with this title."""
        return self.rng.choice(self.processes(title))


# A fault begins at the start of its context, and ends at the end of the context.
Fault = Callable[[Victim], AbstractAsyncContextManager[None]]
