"""Answers go on when the engine of their replica dies, whatever clients have asked for."""

import asyncio

import psutil

from kvroute.local.processes import is_alive
from tests.support.recital import Recital, engine_of, replicas
from tests.support.serving import Cluster
from tests.support.waiting import until


async def test_answers_go_on_when_the_engine_of_their_replica_dies(exact: Cluster) -> None:
    """The last test of this cluster: a replica's successor takes half a minute of a core."""
    undisturbed = await Recital(exact).heard()
    recital = Recital(exact)
    going_on = asyncio.create_task(recital.heard())
    await recital.is_going_on()
    victim = recital.pieces[0]
    replica = psutil.Process(replicas(exact)[victim]["pid"])
    engine = engine_of(replica)
    engine.kill()
    assert await going_on == undisturbed
    await until(lambda: victim not in replicas(exact), within_s=180)
    await until(lambda: not is_alive(replica) and not is_alive(engine))
