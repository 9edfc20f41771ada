"""Detects that Ray Serve drains this replica; Serve's own hook runs only after the drain."""

import asyncio

import ray

CHECK_INTERVAL_S = 0.05  # seconds between two checks


async def draining() -> None:
    """Wait until the replica gets no more requests and only finishes the running ones."""
    worker = ray._private.worker.global_worker
    replica = worker.actors[worker.actor_id]._replica_impl
    while not replica._shutting_down:
        await asyncio.sleep(CHECK_INTERVAL_S)
