"""The agents of the attached servers: each forwards requests to one server, and follows its cache.

An agent is a replica for the router. It runs in the router's process and event loop.
"""

import asyncio
import logging
import uuid
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
                await asyncio.gather(*(agent.check() for agent in self._living()))
                await asyncio.sleep(CHECK_S)

    def _adjust(self, tasks: asyncio.TaskGroup) -> None:
        """Start agents for servers that were added, and end those of servers that were removed."""
        if not (urls := self._servers.urls()):  # a mistake, or a file that is being written
            return
        self._wanted = len(urls)
        for agent in self._living():
            if agent.url and agent.url not in urls:
                agent.end(f"{agent.url} is no longer in the list of servers", at_once=False)
        surplus = len(self._living()) - self._wanted
        idle = [agent for agent in self._living() if not agent.url]  # they wait for a server
        for agent in idle[: max(0, surplus)]:
            agent.end("there are enough agents", at_once=True)
        for _ in range(-surplus):
            agent = Agent(self._settings, self._surroundings)
            self._agents[agent.id] = agent
            tasks.create_task(self._live(agent), name=f"agent {agent.id}")

    def _living(self) -> list["Agent"]:
        return [agent for agent in self._agents.values() if not agent.is_ending]

    async def _live(self, agent: "Agent") -> None:
        """Run an agent. If it fails, another one takes its place at the next check."""
        try:
            if reason := await agent.run():
                log.warning("%s", reason)
        finally:
            self._agents.pop(agent.id, None)
            self._ended.append(agent.id)


class Agent:
    """The agent of one server, which it finds itself: the first one that has no agent yet."""

    def __init__(self, settings: ReplicaSettings, surroundings: Surroundings) -> None:
        self.id = uuid.uuid4().hex[:8]
        self._servers = settings.server_list
        self.server = EngineServer(
            settings,
            self.id,
            surroundings,
            host=IN_PROCESS,
            metrics=ReplicaMetrics(CollectorRegistry()),
            on_death=self._die,
        )
        self.has_started = False
        self._ends = asyncio.Event()
        self._at_once = False  # whether its answers end with it
        self._failure = ""  # why it has failed

    @property
    def is_ending(self) -> bool:
        return self._ends.is_set()

    @property
    def state(self) -> str:
        """Return the agent's state in the words of Ray Serve, which users know from replicas."""
        if self.is_ending:
            return "STOPPING"
        return "RUNNING" if self.has_started else "STARTING"

    @property
    def url(self) -> str:
        """Return the address of its server; empty: it has none yet."""
        return self.server.attached_to if self.has_started else ""

    def end(self, reason: str, *, at_once: bool) -> None:
        """End the agent after its answers; at once: with them."""
        log.info("agent %s ends: %s", self.id, reason)
        self._at_once |= at_once
        self._ends.set()

    def fail(self, reason: str) -> None:
        """End the agent because it cannot go on: at once, unless its server was removed."""
        if self.url and self.url not in self._servers.urls():
            self.end(reason, at_once=False)
            return
        self._failure = reason
        self.end(reason, at_once=True)

    async def check(self) -> None:
        """End the agent if one of its tasks has failed."""
        if self.has_started and not self.is_ending:
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
        except asyncio.CancelledError:  # the process ends, and the router has no answers any more
            self._at_once = True
            raise
        except Exception as error:  # a server can be in any state, and costs only its own agent
            log.exception("agent %s cannot start", self.id)
            self._failure = str(error)
        finally:
            ends.cancel()
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            if self.has_started:
                await self.server.close(at_once=self._at_once)
        return self._failure
