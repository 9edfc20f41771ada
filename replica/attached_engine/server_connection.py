"""The connection to an attached server: its HTTP client, its load, and whether it answers."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import httpx

from kvroute.replica.attached_engine.server_facts import (
    Samples,
    ServerError,
    ServerFacts,
    get,
    is_asleep,
    read_facts,
    read_samples,
    silence,
)

log = logging.getLogger("kvroute.attached")

CHECK_INTERVAL_S = 0.5  # seconds between two checks of the server's health
CONNECT_S = 5.0  # timeout in seconds of a new connection
# Seconds that an idle connection is kept. It is less than half of the 5 s after which vLLM's HTTP
# server closes one: a request that is sent just then has no answer.
KEEP_ALIVE_S = 2.0


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
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEP_ALIVE_S
        )
        self.client = httpx.AsyncClient(
            headers=dict(headers),
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            transport=httpx.AsyncHTTPTransport(
                verify=_certificates() if url.startswith("https:") else False,
                uds=None if socket is None else str(socket),
                limits=limits,
                trust_env=False,
            ),
            trust_env=False,
        )
        self.facts: ServerFacts | None = None  # what `start` read; None before
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
                facts = await read_facts(self.client, self.url)
                self.samples = await read_samples(self.client, self.url)
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
            response = await get(self.client, f"{self.url}/health")
        except httpx.HTTPError:
            return True
        return response.status_code != httpx.codes.OK

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
            response = await get(self.client, f"{self.url}/health")
            if response.status_code != httpx.codes.OK:
                status = response.status_code
                return f"{self.url}/health has answered with status {status}; see the server's log"
            if self.away_reason:
                self._compare(await read_facts(self.client, self.url))
            self.samples = await read_samples(self.client, self.url)
            for observe in self.observers:
                observe()
            if is_asleep(self.samples):
                return f"{self.url} is asleep; wake it up with POST {self.url}/wake_up"
        except httpx.HTTPError as error:
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
        await self.client.aclose()


@cache
def _certificates() -> ssl.SSLContext:
    """Return the certificates that this machine trusts; all connections of a process share them."""
    return httpx.create_ssl_context(trust_env=False)


def _kind(facts: ServerFacts) -> tuple[str, list[str], list[tuple[int, int]]]:
    ranks = [(rank.block_size, rank.capacity_blocks) for rank in facts.ranks]
    return facts.model, sorted(facts.adapters), ranks
