"""A replica's claim on one of the attached servers."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from kvroute.store.attached_servers import AttachedServers
from kvroute.store.connection import REDIS_ERRORS

log = logging.getLogger("kvroute.attached")

MAX_REASON = 1000  # maximum characters of a reported reason, which contains text of the server
RETRY_S = 0.5  # seconds between two attempts to claim a server


class Claim:
    """The right of one replica to serve one server; it is renewed until `close`."""

    def __init__(
        self,
        servers: AttachedServers,
        urls: Callable[[], Sequence[str]],
        url: str,
        replica_id: str,
    ) -> None:
        """Begin to renew a claim.

        Args:
            servers: The claims in Redis.
            urls: Returns the addresses of all attached servers now.
            url: The claimed server.
            replica_id: The replica that has claimed it.
        """
        self.url = url
        # Why requests cannot be sent to the server; empty: they can. Each renewal reports it.
        self.away_reason: Callable[[], str] = str
        self._reported = ""  # the reason that was reported last
        self._servers = servers
        self._urls = urls
        self._replica_id = replica_id
        self._task = asyncio.create_task(self._keep(), name="claim")

    async def lost(self) -> str:
        """Wait until the claim is lost, and return why."""
        return await asyncio.shield(self._task)

    def problem(self) -> str:
        """Return why the replica may not serve the server any more; empty: it may."""
        return self._task.result() if self._task.done() else ""

    async def close(self) -> None:
        """Let another replica serve the server at once."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(*REDIS_ERRORS):
            await self._servers.report(self.url, "")
            await self._servers.release(self.url, self._replica_id)

    async def _keep(self) -> str:
        """Renew the claim until it is lost, and return why."""
        while True:
            await asyncio.sleep(self._servers.lease_s / 3)
            if self.url not in self._urls():
                return f"{self.url} is no longer in the list of servers"
            try:
                if not await self._servers.renew(self.url, self._replica_id):
                    return f"another replica serves {self.url}"
                await self._report(self.away_reason()[:MAX_REASON])
            except REDIS_ERRORS:
                continue  # the publisher reports that Redis does not answer

    async def _report(self, reason: str) -> None:
        """Report why requests cannot be sent to the server. A reason has to be repeated."""
        if reason or self._reported:
            await self._servers.report(self.url, reason)
        self._reported = reason


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
        except REDIS_ERRORS as error:
            log.warning("no server can be claimed, because Redis does not answer: %s", error)
        else:
            if not is_waiting:
                log.warning("all %d attached servers have a replica; waiting", len(urls()))
                is_waiting = True
        await asyncio.sleep(RETRY_S)
