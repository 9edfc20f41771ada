"""When Serve lets this process's replica finish: it tells user code only after the fact."""

import asyncio

import ray

LOOK_S = 0.05


async def draining() -> None:
    """Returns once the replica gets no more requests and finishes those it has."""
    worker = ray._private.worker.global_worker
    replica = worker.actors[worker.actor_id]._replica_impl
    while not replica._shutting_down:
        await asyncio.sleep(LOOK_S)
