"""The agents of `kvroute attach`, with engines that do nothing."""

import asyncio

import pytest

from kvroute.gateway import agents
from kvroute.gateway.agents import Agent
from kvroute.gateway.own_surroundings import OneProcess
from kvroute.settings.replica import ReplicaSettings

URL = "http://127.0.0.1:9"


class Engines:
    """Stands for EngineServer. Its check fails once it is closing, as that of ended tasks does."""

    is_busy = False

    def __init__(self, *_: object, **__: object) -> None:
        self.closes, self.is_closed = asyncio.Event(), asyncio.Event()

    async def start(self) -> None: ...

    async def check(self) -> None:
        if self.closes.is_set():
            raise asyncio.CancelledError

    async def close(self, *, at_once: bool) -> None:
        self.closes.set()
        await self.is_closed.wait()


async def test_an_agent_that_closes_slowly_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "EngineServer", Engines)
    settings = ReplicaSettings(model="m", served_model_name="m", redis_url="", attach=(URL,))
    agent = Agent("a", URL, settings, OneProcess("127.0.0.1", "c"))
    engines = agent.server
    assert isinstance(engines, Engines)
    running = asyncio.create_task(agent.run())
    while not agent.has_started:
        await asyncio.sleep(0)
    await agent.check()
    assert agent.state == "RUNNING"
    agent.fail("it does not answer")
    await engines.closes.wait()
    await agent.check()
    assert agent.state == "STOPPING"
    engines.is_closed.set()
    assert await running == "it does not answer"
