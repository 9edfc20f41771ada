"""The connections of this router: one to each replica that runs.

All data parallel ranks of a replica share its connection. Requests and calls name a rank by its id.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from kvroute.contract.generation import EngineDeadError, GenerateRequest
from kvroute.contract.ranks import rank_ids, replica_of, split
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.router.connections.replica_source import NoReplicaError, ReplicaSource
from kvroute.wire.address import Address
from kvroute.wire.in_process import IN_PROCESS
from kvroute.wire.link import FailedError, Link, LostError, RefusedError, Stream, connect
from kvroute.wire.tls import OFF, TlsError, WireTls, client_end

log = logging.getLogger("kvroute.links")

CHECK_INTERVAL_S = 0.1  # seconds between comparisons with the replicas that run
CONNECT_S = 5.0  # longest wait for a replica's address, and for a connection, in seconds
# Seconds between the first two attempts to connect. The pause doubles with each attempt, up to
# LONGEST_PAUSE_S.
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
# Seconds without a connection after which /health reports a replica. One that has ended is usually
# replaced sooner.
REPORT_AFTER_S = 5.0
# Why there is no connection to a replica. An attempt that fails in another way is a fault of ours.
_CONNECT_ERRORS = (
    *(NoReplicaError, LostError, TlsError, TimeoutError),
    *DECODE_ERRORS,
)


class HungError(Exception):
    """The replica was declared dead (liveness.py) while a request waited for it."""


class UnansweredError(Exception):
    """The replica did not answer a call. The message says why."""


class LateError(UnansweredError):
    """The replica did not answer a call in time, but it may still be working on it.

    If a replica hangs, liveness.py closes its connection, and calls raise UnansweredError instead.
    """


# Why a call has no answer.
_CALL_ERRORS = (LostError, HungError, RefusedError, FailedError, EngineDeadError, ValueError)


class Links:
    """Connects to each replica that runs, and again when a connection ends."""

    def __init__(
        self,
        replicas: Callable[[], ReplicaSource],
        on_pending: Callable[[str, int], object] = lambda rank_id, pending_tokens: None,
        tls: WireTls = OFF,
    ) -> None:
        """Create the object without any connection. `run` makes them.

        Args:
            replicas: returns the source of the replicas.
            on_pending: called with the id of a rank and the prompt tokens that it reports as not
                yet computed.
            tls: the router's settings for TLS.
        """
        self._tls = tls
        self._on_pending = on_pending
        # Called with the id of each removed replica. While it returns True, the connection stays.
        self.is_needed: Callable[[str], bool] = lambda replica_id: False
        self.losses = 0  # connections that ended while the replica was listed
        # Replica id -> time of the first failure to connect, and the reason of the last one.
        self._failures: dict[str, tuple[float, str]] = {}
        self._replicas = replicas
        self._links: dict[str, Link] = {}  # replica id -> its connection, if it is open
        self._tasks: dict[str, asyncio.Task[None]] = {}  # replica id -> task that connects to it
        self._ranks: dict[str, tuple[str, ...]] = {}  # replica id -> ranks that it last reported
        self._addresses: dict[str, Address] = {}  # replica id -> address that it last reported

    def connected(self) -> list[str]:
        """Return the ranks of the replicas that run and can get requests now."""
        ids, link_of, ranks = self._replicas().ids(), self._links.get, self._ranks
        ready = [id_ for id_ in ids if (link := link_of(id_)) and link.is_open]
        return [rank_id for id_ in ready for rank_id in ranks[id_]]

    def running(self) -> list[str]:
        """Return the ranks of all replicas that run.

        A replica that has not reported its ranks counts as one rank.
        """
        ids = self._replicas().ids()
        return [rank_id for id_ in ids for rank_id in self.reported_ranks(id_) or rank_ids(id_, 1)]

    def reported_ranks(self, replica_id: str) -> tuple[str, ...]:
        """Return the ranks that the replica has reported; none before its first report."""
        return self._ranks.get(replica_id, ())

    def address(self, rank_id: str) -> Address | None:
        """Return the address of a rank's replica; None before its first report."""
        return self._addresses.get(replica_of(rank_id))

    async def can_reach(self, rank_id: str) -> bool:
        """Return whether the machine of a rank's replica answers, even if the process does not."""
        if (address := self.address(rank_id)) is None:
            return False
        if address.host == IN_PROCESS:
            return True
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(address.host, address.port)
        except ConnectionRefusedError:
            return True  # the process has ended
        except OSError:
            return False
        writer.close()
        return True

    def wire(self) -> dict[str, dict[str, str]]:
        """Return the host of each replica that has reported it, and the mode of its TLS, by id."""
        return {
            id_: {"host": address.host, "tls": address.tls}
            for id_, address in self._addresses.items()
        }

    def unconnected(self) -> dict[str, str]:
        """Return the replicas that have had no connection for REPORT_AFTER_S: id -> reason."""
        now_s = time.monotonic()
        return {
            id_: reason
            for id_, (since_s, reason) in self._failures.items()
            if now_s - since_s >= REPORT_AFTER_S
        }

    def away(self) -> dict[str, str]:
        """Return the replicas whose engine can run no requests now: id -> reason."""
        return {id_: link.away_reason for id_, link in self._links.items() if link.away_reason}

    def able(self) -> list[str]:
        """Return the ranks of all replicas that run and whose engines are not away."""
        away = self.away()
        return [rank_id for rank_id in self.running() if replica_of(rank_id) not in away]

    def is_connected(self, replica_id: str) -> bool:
        """Return whether there is an open connection, even if the replica has been removed."""
        return self._open(replica_id) is not None

    def busy(self) -> set[str]:
        """Return the replicas that run requests of this router, even if they have been removed."""
        return {id_ for id_, link in self._links.items() if link.streams}

    def received_messages(self, replica_id: str) -> int:
        """Return the number of messages that this router has received from the replica."""
        link = self._links.get(replica_id)
        return link.received_messages if link else 0

    def pending_calls(self, rank_id: str) -> int:
        """Return the number of calls that the rank has not answered yet."""
        link = self._links.get(replica_of(rank_id))
        return link.pending_calls if link else 0

    def open(self, rank_id: str, request: GenerateRequest, *, max_waiting: int) -> Stream:
        """Send a request to a rank and return the stream of its chunks.

        Args:
            max_waiting: tokens of unread chunks after which the stream fails.

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
            UnansweredError: the rank did not answer, or refused the call.
            LateError: the rank did not answer within `within_s` seconds.
        """
        replica_id, rank = split(rank_id)
        if (link := self._open(replica_id)) is None:
            _, reason = self._failures.get(replica_id, (0.0, "this replica does not run"))
            raise UnansweredError(f"there is no connection: {reason}")
        try:
            async with asyncio.timeout(within_s):
                return await link.call(method, body, rank)
        except TimeoutError:
            raise LateError(f"no answer within {within_s:g} s") from None
        except _CALL_ERRORS as error:
            raise UnansweredError(str(error)) from error

    def lose(self, replica_id: str, error: Exception) -> None:
        """Close the connection to the replica, and end all requests on it with this error."""
        if link := self._links.get(replica_id):
            link.lose(error)

    def _open(self, replica_id: str) -> Link | None:
        """Return the open connection to the replica, or None if there is none."""
        link = self._links.get(replica_id)
        return link if link is not None and link.is_open else None

    async def run(self) -> None:
        """Keep connections to all replicas until cancelled; then close them."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._update_tasks(tasks)
                    await asyncio.sleep(CHECK_INTERVAL_S)
        finally:
            for link in [*self._links.values()]:
                link.lose(LostError("this router is shutting down"))

    def _update_tasks(self, tasks: asyncio.TaskGroup) -> None:
        """Start a task for each new replica, and cancel the tasks of removed replicas."""
        running = self._replicas().ids()
        for replica_id in running:
            if replica_id not in self._tasks:
                work = self._stay_connected(replica_id)
                self._tasks[replica_id] = tasks.create_task(work, name=f"link {replica_id}")
        for replica_id in self._tasks.keys() - running:
            link = self._links.get(replica_id)
            is_needed = link is not None and self.is_needed(replica_id)
            # A replica that drains finishes its requests.
            if link is None or not (link.streams or is_needed):
                self._tasks.pop(replica_id).cancel()

    async def _stay_connected(self, replica_id: str) -> None:
        """Connect to the replica, and again when the connection ends, until cancelled."""
        handle = self._replicas().hold(replica_id)  # keeps the replica reachable while it drains
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                if await self._connect(replica_id):
                    pause_s = FIRST_PAUSE_S
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        finally:
            del handle
            self._failures.pop(replica_id, None)
            self._ranks.pop(replica_id, None)
            self._addresses.pop(replica_id, None)
            if link := self._links.pop(replica_id, None):
                link.lose(LostError("the replica has been removed"))

    async def _connect(self, replica_id: str) -> bool:
        """Connect, and wait until the connection ends. Return False if there was no connection."""
        try:
            async with asyncio.timeout(CONNECT_S):
                address = await self._replicas().address(replica_id)
            self._ranks[replica_id] = rank_ids(replica_id, address.ranks)
            self._addresses[replica_id] = address
            link = await connect(
                replica_id,
                address.host,
                address.port,
                address.secret,
                within_s=CONNECT_S,
                on_pending=partial(self._report_pending, replica_id),
                # It may read files and make certificates.
                tls=await asyncio.to_thread(client_end, self._tls, address.tls, address.secret),
            )
        except _CONNECT_ERRORS as error:
            self._record_failure(replica_id, str(error) or f"no answer within {CONNECT_S:g} s")
            return False
        self._failures.pop(replica_id, None)
        self._links[replica_id] = link
        self._warn_if_plain(replica_id, address)
        await asyncio.wait([link.closed])
        del self._links[replica_id]
        self.losses += 1
        return True

    def _warn_if_plain(self, replica_id: str, address: Address) -> None:
        if self._tls.is_on and address.tls == "off":
            log.warning(
                "the connection to replica %s is not encrypted, because the replica was started "
                "without --wire-tls; this is normal only until a rolling update has replaced it",
                replica_id,
            )

    def _report_pending(self, replica_id: str, pending_tokens: Sequence[int]) -> None:
        for rank_id, tokens in zip(self.reported_ranks(replica_id), pending_tokens, strict=False):
            self._on_pending(rank_id, tokens)

    def _record_failure(self, replica_id: str, reason: str) -> None:
        since_s, last_reason = self._failures.get(replica_id, (time.monotonic(), ""))
        if last_reason != reason:
            log.warning("no connection to replica %s: %s", replica_id, reason)
        self._failures[replica_id] = since_s, reason
