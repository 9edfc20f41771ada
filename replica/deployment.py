"""The Ray Serve deployment of a replica."""

import asyncio
import contextlib
import logging
import os
from typing import Any

import psutil
from ray import serve

from kvroute.contract.generation import EngineDeadError
from kvroute.process.ray_internals import listen_on_node_address
from kvroute.process.serve_surroundings import ServeSurroundings
from kvroute.process.tracing import start_tracing
from kvroute.replica.engine_metrics import ReplicaMetrics
from kvroute.replica.engine_server import EngineServer
from kvroute.settings.replica import ReplicaSettings
from kvroute.wire.server import HOST

log = logging.getLogger("kvroute.replica")


@serve.deployment
class Replica:
    """A replica that Ray Serve runs."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        listen_on_node_address()
        own, surroundings = ReplicaSettings.model_validate(settings), ServeSurroundings()
        self.id = serve.get_replica_context().replica_id.unique_id
        surroundings.log(own.served_model_name)
        self._tracing = start_tracing("kvroute-replica", self.id)
        self._server = EngineServer(
            own,
            self.id,
            surroundings,
            host=os.environ.get(HOST) or surroundings.address,
            metrics=ReplicaMetrics(),
            tracing=self._tracing,
            on_death=_exit,
        )
        await self._server.start()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the address that routers connect to. Ray Serve delivers it to the routers."""
        return self._server.address().as_stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the input of kvroute/autoscaling.py; Serve calls this if autoscaling is on."""
        return self._server.autoscaling_stats()

    async def check_health(self) -> None:
        """Raise an error if the engine or a background task has failed.

        Serve then replaces the replica.
        """
        await self._server.check()

    async def __del__(self) -> None:
        """Shut the replica down after all its requests have finished.

        Ray Serve calls this method, and kills the process if it takes too long.
        """
        await self._server.close()
        if self._tracing:
            await asyncio.to_thread(self._tracing.close)


def _exit(error: EngineDeadError) -> None:
    """Exit this process, so that Serve starts a new replica at once."""
    log.error("the engine died, so this replica exits and is replaced: %s", error)
    _kill_children()  # otherwise a child that is stopped by SIGSTOP would survive
    os._exit(1)


def _kill_children() -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
