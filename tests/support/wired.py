"""Replicas in this process, and a router's real connections to them."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Self

from kvroute.contract.generation import Generate
from kvroute.router.connections.links import Links
from kvroute.router.connections.liveness import Liveness
from kvroute.router.connections.replica_source import Deployed
from kvroute.router.dispatch.admission import AdmissionControl
from kvroute.router.dispatch.dispatcher import Dispatcher
from kvroute.router.dispatch.questions import Questions
from kvroute.router.placement.fleet import Fleet
from kvroute.router.queueing.holding import Holding
from kvroute.router.queueing.queue import Queue
from kvroute.router.queueing.wake import Wake
from kvroute.wire.address import Address
from kvroute.wire.server import Method, Server, new_secret
from kvroute.wire.tls import OFF, WireTls, server_ends
from tests.support.waiting import until

LOOPBACK = "127.0.0.1"


class Wired:
    """Replicas in this process, in place of those that Serve runs (connections/serve_source.py).

    `most` is the maximum number of requests of each replica, and `ranks` the number of its ranks.
    `tls` are the settings of the replicas for TLS, and `router_tls` those of the router.
    """

    def __init__(
        self,
        generates: Mapping[str, Generate],
        methods: Mapping[str, Method] | None = None,
        *,
        most: int = 1000,
        ranks: int = 1,
        tls: WireTls = OFF,
        router_tls: WireTls = OFF,
    ) -> None:
        secrets = {id_: new_secret() for id_ in generates}
        self.servers = {
            id_: Server(
                generate,
                methods or {},
                max_requests=most,
                secret=secrets[id_],
                tls=server_ends(tls, secrets[id_]),
            )
            for id_, generate in generates.items()
        }
        self.links = Links(lambda: self, tls=router_tls)
        self._tls = tls
        self.killed: list[str] = []
        self._listed = [*self.servers]
        self._ranks = ranks

    async def __aenter__(self) -> Self:
        for server in self.servers.values():
            await server.start(LOOPBACK)
        self._running = asyncio.create_task(self.links.run())
        await until(lambda: len(self.links.connected()) == self._ranks * len(self._listed))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.wait([self._running])
        for server in self.servers.values():
            await server.close()

    def drop(self, replica_id: str) -> None:
        """Let Serve no longer list a replica."""
        self._listed.remove(replica_id)

    def list(self, replica_id: str) -> None:
        """Let Serve list a replica again."""
        self._listed.append(replica_id)

    def ids(self) -> Collection[str]:
        return self._listed

    def hold(self, replica_id: str) -> object:
        return self.servers[replica_id]

    async def address(self, replica_id: str) -> Address:
        server = self.servers[replica_id]
        return Address(LOOPBACK, server.port, server.secret, self._ranks, self._tls.mode)

    async def probe(self, replica_id: str) -> None: ...

    async def kill(self, replica_id: str) -> None:
        self.killed.append(replica_id)

    def deployed(self) -> Deployed:
        return Deployed(len(self._listed), dict.fromkeys(self._listed, "RUNNING"), frozenset())


def dispatcher_of(wired: Wired, fleet: Fleet) -> Dispatcher:
    """Return a dispatcher for requests that never have to wait in the queue."""
    liveness = Liveness(lambda: wired, wired.links, fleet, hang_timeout_s=5)
    holding = Holding(Queue(lambda: 1.0), fleet, liveness.trusted, wake=Wake())
    return Dispatcher(wired.links, fleet, AdmissionControl(fleet, liveness, holding))


def questions_of(wired: Wired, dispatcher: Dispatcher) -> Questions:
    """Return the sender of calls that any of the same replicas can answer."""
    return Questions(wired.links, dispatcher.control)


class FakeLinks:
    """Replaces Links. The test sets the state of the connections."""

    def __init__(self, connected: Callable[[], list[str]]) -> None:
        self.connected = self.running = connected
        self.waiting = set[str]()  # replicas that run requests
        self.messages = 0  # number of messages from each replica
        self.questions = 0  # number of unanswered questions to each replica
        self.lost: list[tuple[str, Exception]] = []
        self.by_replica: dict[str, tuple[str, ...]] = {}
        self.away_reasons: dict[str, str] = {}  # replica -> why its engine can run no requests

    def away(self) -> dict[str, str]:
        return self.away_reasons

    def busy(self) -> set[str]:
        return self.waiting

    def reported_ranks(self, replica_id: str) -> tuple[str, ...]:
        return self.by_replica.get(replica_id, ())

    def received_messages(self, replica_id: str) -> int:
        return self.messages

    def pending_calls(self, replica_id: str) -> int:
        return self.questions

    def lose(self, replica_id: str, error: Exception) -> None:
        self.lost.append((replica_id, error))
