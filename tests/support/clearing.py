"""Clears the cache of one replica in a running cluster."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from kvroute.controller.ray_connection import connected
from tests.support.serving import Cluster


@contextlib.contextmanager
def cache_clearer(cluster: Cluster) -> Iterator[Callable[[str], None]]:
    """Yield a function that clears the cache of the replica with this id.

    This process is a driver of the cluster's Ray until the context ends.
    """
    import ray

    address = httpx.get(f"{cluster.url}/v1/cluster", timeout=10).json()["ray_address"]
    with connected(address):
        actors = ray.util.list_named_actors(all_namespaces=True)

        def clear(replica_id: str) -> None:
            (actor,) = (actor for actor in actors if actor["name"].endswith(replica_id))
            handle = ray.get_actor(actor["name"], namespace=actor["namespace"])
            while ray.get(handle.__ray_call__.remote(_clearing()), timeout=10):
                time.sleep(0.01)  # the replica was not idle

        yield clear


def _clearing() -> Callable[[Any], int]:
    """Return a function that clears the cache and returns the number of blocks that remain.

    It is a nested function, so that Ray sends its code to the replica, which cannot import tests.
    """

    def clear(actor: Any) -> int:
        import asyncio

        (rank,) = actor._replica_impl._user_callable_wrapper.user_callable._server._ranks
        engine = rank.engine
        asyncio.run_coroutine_threadsafe(engine.reset_prefix_cache(), engine._task.get_loop())
        return len(engine._pool.copies())

    return clear
