"""A replica's claim on one of the attached servers."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redis.exceptions import RedisError

from kvroute.store.attached_servers import AttachedServers

log = logging.getLogger("kvroute.attached")

RETRY_S = 0.5  # seconds between two attempts to claim a server


class ClaimLostError(Exception):
    """The replica may not serve the server any more."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right of one replica to serve one server, as long as it is renewed."""

    servers: AttachedServers
    urls: Callable[[], Sequence[str]]  # returns the addresses of all attached servers now
    url: str
    replica_id: str

    async def keep(self) -> None:
        """Renew the claim until cancelled.

        Raises:
            ClaimLostError: Another replica serves the server, or the server is no longer listed.
        """
        while True:
            await asyncio.sleep(self.servers.lease_s / 3)
            if self.url not in self.urls():
                raise ClaimLostError(f"{self.url} is no longer in the list of servers")
            try:
                if not await self.servers.renew(self.url, self.replica_id):
                    raise ClaimLostError(f"another replica serves {self.url}")
            except (RedisError, OSError):
                continue  # the publisher reports that Redis does not answer

    async def release(self) -> None:
        """Let another replica serve the server at once."""
        with contextlib.suppress(RedisError, OSError):
            await self.servers.release(self.url, self.replica_id)


async def claim(
    servers: AttachedServers, urls: Callable[[], Sequence[str]], replica_id: str
) -> Claim:
    """Wait for a server that no other replica serves, and claim it."""
    is_waiting = False
    while True:
        try:
            if (url := await servers.claim(urls(), replica_id)) is not None:
                log.info("this replica serves %s", url)
                return Claim(servers, urls, url, replica_id)
        except (RedisError, OSError) as error:
            log.warning("no server can be claimed, because Redis does not answer: %s", error)
        else:
            if not is_waiting:
                log.warning("all %d attached servers have a replica; waiting", len(urls()))
                is_waiting = True
        await asyncio.sleep(RETRY_S)
