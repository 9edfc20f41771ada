"""The connection to an attached server: its HTTP client, its load, and whether it answers."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from kvroute.replica.attached_engine.server_client import ServerClient, ServerLostError
from kvroute.replica.attached_engine.server_facts import (
    Samples,
    ServerError,
    ServerFacts,
    is_asleep,
    read_facts,
    read_samples,
    silence,
)

log = logging.getLogger("kvroute.attached")

CHECK_INTERVAL_S = 1.0  # seconds between two checks of the server's health


class ServerConnection:
    """One server, shared by the engines of its data parallel ranks."""

    def __init__(self, url: str, headers: Mapping[str, str], *, socket: Path | None = None) -> None:
        """Create a connection.

        Args:
            url: The server's address.
            headers: Headers of every request.
            socket: The server's Unix socket; None: it is reached by its address.
        """
        self.url = url
        self.client = ServerClient(url, headers, socket=socket)
        # What the server said of itself when it was first reached; None: it was not reached yet.
        self.facts: ServerFacts | None = None
        self.samples: Samples = {}  # the latest metrics
        self.observers: list[Callable[[], None]] = []  # called when `samples` was read again
        self.away_reason = ""  # why the server cannot answer; empty: it can
        # How the server that has come back differs from `facts`. Empty if it does not differ.
        self.changed = ""
        self._is_away, self._is_back, self._suspicion = (asyncio.Event() for _ in range(3))
        self._is_back.set()

    async def start(self, misfit: Callable[[ServerFacts], str] = lambda facts: "") -> ServerFacts:
        """Wait until the server answers and can be used, and return its facts.

        Args:
            misfit: Returns why a server with these facts cannot be used; empty: it can.
        """
        while True:
            try:
                facts = await read_facts(self.client)
                self.samples = await read_samples(self.client)
                reason = misfit(facts)
                if not reason:
                    self.facts, self.away_reason = facts, ""
                    return facts
            except ServerError as error:
                reason = str(error)
            if reason != self.away_reason:
                log.warning("waiting for a server: %s", reason)
            self.away_reason = reason
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def watch(self) -> None:
        """Check the server's health and read its load, until cancelled."""
        while True:
            reason = await self._problem()
            if bool(reason) != bool(self.away_reason):
                if reason:
                    log.warning("server %s is away: %s", self.url, reason)
                else:
                    log.info("server %s is back", self.url)
                (self._is_away if reason else self._is_back).set()
                (self._is_back if reason else self._is_away).clear()
            self.away_reason = reason
            self._suspicion.clear()
            try:
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await self._suspicion.wait()
            except TimeoutError:
                pass

    def suspect(self) -> None:
        """Check the server's health now, because a request has failed."""
        self._suspicion.set()

    async def is_lost(self) -> bool:
        """Ask the server for its health, and return whether it is away."""
        try:
            return not (await self.client.get("/health")).is_ok
        except ServerLostError:
            return True

    async def wait_until_away(self) -> str:
        """Wait until the server does not answer, and return why."""
        await self._is_away.wait()
        return self.away_reason

    async def wait_until_back(self) -> None:
        """Wait until the server answers."""
        await self._is_back.wait()

    async def _problem(self) -> str:
        """Return why the server cannot answer; empty: it can."""
        try:
            health = await self.client.get("/health")
            if not health.is_ok:
                return (
                    f"{self.url}/health has answered with status {health.status}; see the server's "
                    "log"
                )
            if self.away_reason:
                self._compare(await read_facts(self.client))
            self.samples = await read_samples(self.client)
            for observe in self.observers:
                observe()
            if is_asleep(self.samples):
                return f"{self.url} is asleep; wake it up with POST {self.url}/wake_up"
        except ServerLostError as error:
            return silence(self.url, error)
        except ServerError as error:
            return str(error)
        return ""

    def _compare(self, facts: ServerFacts) -> None:
        """Record in `changed` how a server that has come back differs from the earlier one."""
        if self.facts is None:
            return
        before, now = _kind(self.facts), _kind(facts)
        if now != before:
            self.changed = (
                f"{self.url} served {before} (model, adapters, block size and blocks of each rank) "
                f"and now serves {now}"
            )

    async def close(self) -> None:
        """Close the connections to the server."""
        await self.client.close()


def _kind(facts: ServerFacts) -> tuple[str, list[str], list[tuple[int, int]]]:
    ranks = [(rank.block_size, rank.capacity_blocks) for rank in facts.ranks]
    return facts.model, sorted(facts.adapters), ranks
