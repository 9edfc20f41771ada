"""The cluster that suffers, and what a fault needs to know of it."""

import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass

import psutil
import redis.asyncio as redis

from tests.support.redis_server import Wired


@dataclass(frozen=True)
class Victim:
    """A cluster, its Redis, and a source of choices."""

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
        """Those whose title or name contains this."""
        return self.wired.cluster.titled(title)

    def memory_bytes(self) -> int:
        """What routers and replicas have to themselves."""
        own = 0
        for process in self.processes("kvroute:Router") + self.processes("kvroute:Replica"):
            with suppress(psutil.Error):
                own += process.memory_full_info().uss
        return own

    def any_of(self, title: str) -> psutil.Process:
        return self.rng.choice(self.processes(title))


# Begins when the block is entered, and is over when it is left.
Fault = Callable[[Victim], AbstractAsyncContextManager[None]]
