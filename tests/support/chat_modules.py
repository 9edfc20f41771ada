"""Lists the modules of kvroute on the way of a chat: `python -m tests.support.chat_modules`.

A router and a replica with a simulated engine run in this process, the replica in a thread of its
own, and answer one streamed chat. A module is on the way if one of its functions runs between the
request and the end of the answer. What runs beside requests is not started: the copy of the index,
messages to other routers, and the events with which a replica publishes its blocks. Modules that
only define constants and msgspec's structs have no functions that run, so they are not listed.
"""

import asyncio
import sys
import threading
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from kvroute.contract.identity import identify
from kvroute.contract.records import Description, Load, ReplicaRecord
from kvroute.features.replica_feature import ReplicaFeatures
from kvroute.replica.engine_metrics import ReplicaMetrics
from kvroute.replica.engine_server import EngineServer
from kvroute.replica.rank import Rank
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from kvroute.router.api.bodies import Bodies
from kvroute.router.application import application
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.router.serving.model_router import ModelRouter
from kvroute.router.serving.models import Models
from kvroute.store.connection import connect
from kvroute.store.index import Index
from tests.support.router_parts import NOWHERE, builtin_prompts, fake_parts
from tests.support.waiting import until
from tests.support.wired import Wired

CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "Which modules does this chat pass? " * 8}],
    "max_tokens": 4,
    "stream": True,
}
BLOCK = 32


class Recorder:
    """The modules of kvroute whose functions have run in a thread."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        is_body = frame.f_code.co_name == "<module>"  # an import, which only the first chat needs
        if self.is_on and event == "call" and name.startswith("kvroute.") and not is_body:
            self.modules.add(name)


def chat_modules() -> dict[str, set[str]]:
    """Return the modules on the way of a second chat, in the router and in the replica.

    The first chat fills what is only computed once.
    """
    router, replica = Recorder(), Recorder()
    with replica_thread(replica) as loop:
        before = sys.getprofile()
        sys.setprofile(router)
        try:
            asyncio.run(_chats(loop, [router, replica]))
        finally:
            sys.setprofile(before)
    return {"router": router.modules, "replica": replica.modules}


@contextmanager
def replica_thread(recorder: Recorder) -> Iterator[asyncio.AbstractEventLoop]:
    """Yield the event loop of a thread whose functions are recorded."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        sys.setprofile(recorder)
        loop.run_forever()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _chats(loop: asyncio.AbstractEventLoop, recorders: Iterable[Recorder]) -> None:
    async def there(work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    prompts = builtin_prompts()
    rank, wired = await there(_started(prompts))
    parts = fake_parts(prompts, wired, model=prompts.model, block_size=BLOCK)
    identity = identify(prompts.model, revision="", block_size=BLOCK)
    parts.fleet.update([ReplicaRecord("r", "1", 0, rank.engine.facts, Load(), identity=identity)])
    links = asyncio.create_task(parts.links.run())
    await until(lambda: bool(parts.links.connected()))
    http = application(Models("router", [ModelRouter(parts)]), Bodies(limit_mb=1))
    transport = httpx.ASGITransport(http)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        for is_on in (False, True):
            for recorder in recorders:
                recorder.is_on = is_on
            answer = await client.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200, answer.text
            assert answer.text.rstrip().endswith("data: [DONE]"), answer.text
    for recorder in recorders:
        recorder.is_on = False
    links.cancel()
    await asyncio.wait([links])
    prompts.close()
    await there(_ended(rank, wired))


async def _started(prompts: Prompts) -> tuple[Rank, Wired]:
    """Start a replica's server and its engine."""
    engine = SimulatedEngine(SimulatedConfig(model="m", block_size=BLOCK), tokenizer=prompts.model)
    rank = Rank(
        engine,
        Index(connect(NOWHERE), "m"),
        ReplicaMetrics(CollectorRegistry()),
        None,
        rank_id="r",
        description=Description(engine.facts),
        lease_s=3.0,
        reports=dict,
    )
    replica = object.__new__(EngineServer)
    replica._features, replica._ranks = ReplicaFeatures(), [rank]
    wired = Wired({"r": replica._generate})
    await wired.servers["r"].start("127.0.0.1")
    return rank, wired


async def _ended(rank: Rank, wired: Wired) -> None:
    await wired.servers["r"].close()
    await rank.engine.close()


if __name__ == "__main__":
    found = chat_modules()
    for side, modules in found.items():
        of_features = sum(name.startswith("kvroute.features.") for name in modules)
        heading = f"{side}: {len(modules)} modules, {of_features} of them in kvroute/features"
        print(heading, *sorted(modules), sep="\n  ")
    print(f"{len(set().union(*found.values()))} modules in all")
