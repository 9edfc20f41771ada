"""The Serve deployment of a router."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from kvroute.process.ray_internals import listen_on_node_address
from kvroute.process.serve_surroundings import ServeSurroundings
from kvroute.router.assembled import AssembledRouter
from kvroute.router.connections.serve_source import ServeSource
from kvroute.settings.router import RouterSettings


@serve.deployment
@serve.ingress()
class Router:
    """A router that Ray Serve runs."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, models: Sequence[tuple[dict[str, Any], Sequence[DeploymentHandle]]]
    ) -> None:
        """Start the router.

        Args:
            models: for each model, its settings (RouterSettings) and the handle of each deployment
                of its replicas.
        """
        listen_on_node_address()
        self._router = await AssembledRouter.start(
            [
                (RouterSettings.model_validate(settings), ServeSource(handles))
                for settings, handles in models
            ],
            ServeSurroundings(),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP application. Serve calls this after the constructor."""
        return self._router.application()

    async def stop(self) -> int:
        """Refuse new requests from now on, and return the number of running answers.

        `kvroute serve` calls this through Serve when it shuts down.
        """
        return await self._router.stop()

    async def end_answers(self) -> None:
        """End all running answers with an error."""
        self._router.end_answers()

    async def check_health(self) -> None:
        """Raise the error of a background task that has ended. Serve then replaces the router."""
        self._router.check()

    async def __del__(self) -> None:
        """Close the router; Serve calls this at shutdown."""
        await self._router.close()
