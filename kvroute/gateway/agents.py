"""The agents of the attached servers: each forwards requests to one server, and follows its cache.

An agent is a replica for the router. It runs in the router's process and event loop.
"""

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Collection

from prometheus_client import CollectorRegistry

from kvroute.contract.generation import EngineDeadError
from kvroute.process.surroundings import Surroundings
from kvroute.replica.engine_metrics import ReplicaMetrics
from kvroute.replica.engine_server import EngineServer
from kvroute.router.connections.replica_source import Deployed, NoReplicaError
from kvroute.settings.replica import ReplicaSettings
from kvroute.wire.address import Address
from kvroute.wire.in_process import IN_PROCESS

log = logging.getLogger("kvroute.gateway")

CHECK_S = 1.0  # seconds between two reads of the list of servers, and checks of the agents
ID_BYTES = 6  # bytes of an agent's id
KEPT_ENDED = 100  # ended agents that are still listed


class Agents:
    """One agent for each server in the list. Implements replica_source.ReplicaSource."""

    def __init__(self, settings: ReplicaSettings, surroundings: Surroundings) -> None:
        self._settings = settings
        self._surroundings = surroundings
        self._servers = settings.server_list
        self._wanted = len(self._servers.urls())
        self._agents: dict[str, Agent] = {}  # agent's id -> the agent
        self._ended = deque[str](maxlen=KEPT_ENDED)  # ids of agents that have ended

    # What the router asks for.

    def ids(self) -> Collection[str]:
        return [id_ for id_, agent in self._agents.items() if agent.state == "RUNNING"]

    def hold(self, replica_id: str) -> object:
        return self._agents.get(replica_id)

    async def address(self, replica_id: str) -> Address:
        agent = self._agents.get(replica_id)
        if agent is None or not agent.has_started:
            raise NoReplicaError(f"{replica_id} does not run")
        return agent.server.address()

    async def probe(self, replica_id: str) -> None:
        """Return at once: an agent answers whenever the event loop of the router runs."""

    async def kill(self, replica_id: str) -> None:
        if agent := self._agents.get(replica_id):
            agent.fail("it does not answer")

    def deployed(self) -> Deployed:
        states = {id_: agent.state for id_, agent in [*self._agents.items()]}
        return Deployed(self._wanted, states, frozenset(self._ended))

    # Their life.

    async def run(self) -> None:
        """Keep one agent for each server until cancelled; then all of them end."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._adjust(tasks)
                for agent in [*self._agents.values()]:
                    await agent.check()
                await asyncio.sleep(CHECK_S)

    def _adjust(self, tasks: asyncio.TaskGroup) -> None:
        """Start agents for servers that were added, and end those of servers that were removed."""
        if not (urls := self._servers.urls()):  # a mistake, or a file that is being written
            return
        self._wanted = len(urls)
        for agent in self._agents.values():
            agent.is_wanted = agent.url in urls
        for url in urls:
            if (id_ := agent_id(url)) not in self._agents:
                agent = self._agents[id_] = Agent(id_, url, self._settings, self._surroundings)
                tasks.create_task(self._live(agent), name=f"agent {id_}")

    async def _live(self, agent: "Agent") -> None:
        """Run an agent. If it fails, another one takes its place at the next check."""
        try:
            if reason := await agent.run():
                log.warning("%s", reason)
        finally:
            self._agents.pop(agent.id, None)
            self._ended.append(agent.id)


def agent_id(url: str) -> str:
    """Return the id of a server's agent: the same in all processes that share the server."""
    return hashlib.blake2b(url.encode(), digest_size=ID_BYTES).hexdigest()


class Agent:
    """The agent of one server.

    Attributes:
        is_wanted: Whether the server is in the list. If not, the agent gets no requests any more,
            and ends after its answers.
    """

    def __init__(
        self, id_: str, url: str, settings: ReplicaSettings, surroundings: Surroundings
    ) -> None:
        self.id = id_
        self.url = url
        self.is_wanted = True
        self.server = EngineServer(
            settings.attached_to(url),
            self.id,
            surroundings,
            host=IN_PROCESS,
            metrics=ReplicaMetrics(CollectorRegistry()),
            on_death=self._die,
            is_shared=True,
        )
        self.has_started = False
        self._ends = asyncio.Event()
        self._failure = ""  # why it has failed

    @property
    def state(self) -> str:
        """Return the agent's state in the words of Ray Serve, which users know from replicas."""
        if self._ends.is_set() or not self.is_wanted:
            return "STOPPING"
        return "RUNNING" if self.has_started else "STARTING"

    def fail(self, reason: str) -> None:
        """End the agent with its answers, because it cannot go on."""
        self._failure = reason
        self._ends.set()

    async def check(self) -> None:
        """End the agent if one of its tasks has failed, or if it has nothing to do any more."""
        if self._ends.is_set():  # it is closing, and its tasks end
            return
        if not self.is_wanted and not (self.has_started and self.server.is_busy):
            log.info("agent %s ends: %s is no longer in the list of servers", self.id, self.url)
            self._ends.set()
        elif self.has_started:
            try:
                await self.server.check()
            except Exception as error:  # whatever a task has raised, only this agent starts again
                self.fail(f"the agent of {self.url} starts again: {error!r}")

    def _die(self, error: EngineDeadError) -> None:
        self.fail(f"the agent of {self.url} starts again: {error}")

    async def run(self) -> str:
        """Run until the agent ends. Return why it has failed; empty: it has not."""
        starting = asyncio.create_task(self.server.start(), name=f"start of agent {self.id}")
        ends = asyncio.create_task(self._ends.wait(), name=f"end of agent {self.id}")
        try:
            await asyncio.wait([starting, ends], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                self.has_started = True
                await ends
        except Exception as error:  # a server can be in any state, and costs only its own agent
            log.exception("agent %s cannot start", self.id)
            self._failure = str(error)
        finally:
            ends.cancel()
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            if self.has_started:
                await self.server.close(at_once=True)
        return self._failure
