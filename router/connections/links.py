"""This router's connections: one to each replica that Ray Serve runs, for all of its ranks."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace
from ray.exceptions import RayError

from kvroute.contract.generation import EngineDeadError, GenerateRequest
from kvroute.contract.ranks import rank_ids, replica_of, split
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.router.connections.replicas import ServeReplicas, UnknownReplicaError
from kvroute.wire.link import FailedError, Link, LostError, RefusedError, Stream, connect

log = logging.getLogger("kvroute.links")

CHECK_INTERVAL_S = 0.1  # seconds between comparisons with the replicas that Serve runs
CONNECT_S = 5.0  # the longest wait for an address, and for a connection
FIRST_PAUSE_S = 0.1  # seconds between the first two attempts to connect; doubles each time
LONGEST_PAUSE_S = 2.0
NOTED_S = (
    5.0  # seconds without a connection until it is reported; Serve may just replace the replica
)


class UnansweredError(Exception):
    """The replica did not answer; the message is the reason."""


class LateError(UnansweredError):
    """It may still be at work on the question; one that hangs loses its connection instead."""


class Links:
    """Connects to replicas as they come, and again when a connection ends.

    Requests and questions go to ranks; all else is about replicas.
    """

    def __init__(
        self,
        replicas: Callable[[], ServeReplicas],
        on_pending: Callable[[str, int], object] = lambda rank_id, pending_tokens: None,
    ) -> None:
        """told: called with what a rank says that it has to compute."""
        self._on_pending = on_pending
        self.losses = 0  # connections that ended while Serve ran the replica
        self._failures: dict[str, tuple[float, str]] = {}  # replica id -> since when, and why
        self._replicas = replicas
        self._links: dict[str, Link] = {}  # replica id -> its connection, if it is ready
        self._kept: dict[str, asyncio.Task[None]] = {}
        self._ranks: dict[str, tuple[str, ...]] = {}  # replica id -> its ranks, as it last told

    def connected(self) -> list[str]:
        """Return the ranks of the replicas that Serve runs and that can get requests now."""
        ids, link_of, ranks = self._replicas().ids(), self._links.get, self._ranks
        ready = [id_ for id_ in ids if (link := link_of(id_)) and link.is_open]
        return [rank_id for id_ in ready for rank_id in ranks[id_]]

    def running(self) -> list[str]:
        """Return the known ranks of the replicas that Serve runs."""
        ids = self._replicas().ids()
        return [rank_id for id_ in ids for rank_id in self.told_ranks(id_) or rank_ids(id_, 1)]

    def told_ranks(self, replica_id: str) -> tuple[str, ...]:
        """Empty until the replica has told."""
        return self._ranks.get(replica_id, ())

    def unconnected(self) -> dict[str, str]:
        """Return the replicas that have had no connection for a while, and the reasons."""
        now_s = time.monotonic()
        return {
            id_: why for id_, (since_s, why) in self._failures.items() if now_s - since_s >= NOTED_S
        }

    def busy(self) -> set[str]:
        """Return the replicas that run requests of this router, even if Serve has removed them."""
        return {id_ for id_, link in self._links.items() if link.streams}

    def received_messages(self, replica_id: str) -> int:
        """Return the number of messages that have come from the replica."""
        link = self._links.get(replica_id)
        return link.received_messages if link else 0

    def pending_calls(self, rank_id: str) -> int:
        """Return the number of calls that the rank has not answered yet."""
        link = self._links.get(replica_of(rank_id))
        return link.pending_calls if link else 0

    def open(self, rank_id: str, request: GenerateRequest, *, max_waiting: int) -> Stream:
        """Send a request to a rank and return the stream of its chunks.

        Raises:
            LostError: there is no connection, or it has ended.
            RefusedError: the replica is full or is stopping.
        """
        replica_id, rank = split(rank_id)
        if link := self._open(replica_id):
            request = replace(request, rank=rank) if rank else request
            return link.open(request, max_waiting=max_waiting)
        raise LostError("there is no connection")

    async def call(self, rank_id: str, method: str, body: bytes, *, within_s: float) -> bytes:
        """Call a method of a rank and return its answer.

        Raises:
            UnansweredError: there was no answer in time.
        """
        replica_id, rank = split(rank_id)
        if (link := self._open(replica_id)) is None:
            _, reason = self._failures.get(replica_id, (0.0, "Serve does not run it"))
            raise UnansweredError(f"there is no connection: {reason}")
        try:
            async with asyncio.timeout(within_s):
                return await link.call(method, body, rank)
        except TimeoutError:
            raise LateError(f"it has not answered within {within_s:g} s") from None
        except (LostError, RefusedError, FailedError, EngineDeadError, ValueError) as error:
            raise UnansweredError(str(error)) from error

    def lose(self, replica_id: str, error: Exception) -> None:
        """End the connection and all requests on it."""
        if link := self._links.get(replica_id):
            link.lose(error)

    def _open(self, replica_id: str) -> Link | None:
        """Return the connection to the replica; None: it has just ended."""
        link = self._links.get(replica_id)
        return link if link is not None and link.is_open else None

    async def run(self) -> None:
        """Keep connections to all replicas until cancelled; then close them."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._compare(tasks)
                    await asyncio.sleep(CHECK_INTERVAL_S)
        finally:
            for link in [*self._links.values()]:
                link.lose(LostError("this router ends"))

    def _compare(self, tasks: asyncio.TaskGroup) -> None:
        running = self._replicas().ids()
        for replica_id in running:
            if replica_id not in self._kept:
                keeping = tasks.create_task(self._keep(replica_id), name=f"link {replica_id}")
                self._kept[replica_id] = keeping
        for replica_id in self._kept.keys() - running:
            link = self._links.get(replica_id)
            if link is None or not link.streams:  # a replica that stops finishes what it runs
                self._kept.pop(replica_id).cancel()

    async def _keep(self, replica_id: str) -> None:
        """Stay connected to the replica until cancelled."""
        held = self._replicas().hold(replica_id)
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                if await self._connect(replica_id):
                    pause_s = FIRST_PAUSE_S
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        finally:
            del held
            self._failures.pop(replica_id, None)
            self._ranks.pop(replica_id, None)
            if link := self._links.pop(replica_id, None):
                link.lose(LostError("the replica has left"))

    async def _connect(self, replica_id: str) -> bool:
        """Return True when the connection has ended, or False if it could not be made."""
        try:
            async with asyncio.timeout(CONNECT_S):
                address = await self._replicas().address(replica_id)
            self._ranks[replica_id] = rank_ids(replica_id, address.ranks)
            link = await connect(
                replica_id,
                address.host,
                address.port,
                address.secret,
                within_s=CONNECT_S,
                on_pending=partial(self._report_pending, replica_id),
            )
        except (RayError, UnknownReplicaError, LostError, TimeoutError, *DECODE_ERRORS) as error:
            self._note(replica_id, str(error) or f"silence for {CONNECT_S:g} s")
            return False
        self._failures.pop(replica_id, None)
        self._links[replica_id] = link
        await asyncio.wait([link.closed])
        del self._links[replica_id]
        self.losses += 1
        return True

    def _report_pending(self, replica_id: str, pending_tokens: Sequence[int]) -> None:
        for rank_id, tokens in zip(self.told_ranks(replica_id), pending_tokens, strict=False):
            self._on_pending(rank_id, tokens)

    def _note(self, replica_id: str, reason: str) -> None:
        since_s, known = self._failures.get(replica_id, (time.monotonic(), ""))
        if known != reason:
            log.warning("no connection to replica %s: %s", replica_id, reason)
        self._failures[replica_id] = since_s, reason
