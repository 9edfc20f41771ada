"""The surroundings of a process that Ray Serve has started."""

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from kvroute.process import ray_internals
from kvroute.process.draining import draining
from kvroute.process.logs import log_to_serve

CALL_S = 5.0  # timeout in seconds for Ray and for Ray Serve's controller


class ServeSurroundings:
    """What Ray Serve says about this process. Implements surroundings.Surroundings."""

    def __init__(self) -> None:
        self.address: str = ray.util.get_node_ip_address()
        self.cluster_address: str = ray.get_runtime_context().gcs_address
        self.application: str = serve.get_replica_context().app_name

    async def draining(self) -> None:
        await draining()

    def log(self, model: str | None) -> None:
        log_to_serve(model)

    async def facts(self, port: int) -> dict[str, Any]:
        deployments, nodes, host = await asyncio.gather(
            _with_timeout(lambda: _deployments(self.application)),
            _with_timeout(_nodes),
            _with_timeout(ray_internals.endpoint_host),
        )
        return {
            "host": host,
            "nodes": nodes,
            "serve": {
                "haproxy": ray_internals.HAPROXY_IS_ON,
                "came_through_haproxy": port in ray_internals.DIRECT_PORTS,
                "throughput_optimized": ray_internals.IS_THROUGHPUT_OPTIMIZED,
                "deployments": deployments,
            },
        }


async def _with_timeout(call: Callable[[], Any]) -> Any:
    """Return the result of a call to Ray; None if it fails or takes longer than CALL_S."""
    try:
        async with asyncio.timeout(CALL_S):
            return await asyncio.to_thread(call)
    except (RayError, RayServeException, TimeoutError, KeyError, ValueError):  # no controller
        return None


def _deployments(application: str) -> dict[str, Any]:
    """Return the application's deployments by name, as Ray Serve's controller reports them."""
    deployments = serve.status().applications[application].deployments
    return {
        name: {
            "status": str(deployment.status.value),
            "message": deployment.message,
            "replicas": {str(key): count for key, count in deployment.replica_states.items()},
        }
        for name, deployment in deployments.items()
    }


def _nodes() -> list[str]:
    """Return the addresses of the live nodes."""
    return sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
