"""HTTP: one router's routes put together, errors in OpenAI's shape."""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from replica.logs import log_to_serve
from replica.model import resolve
from router.api import cluster_routes, openai_routes, prefix_routes, ui_routes
from router.api.errors import ApiError
from router.api.prompt import Prompts
from router.api.request_id import request_id
from router.insight import tracing
from router.models import Models
from router.parts import Parts
from router.settings import RouterSettings

log = logging.getLogger("kvroute.ingress")


@serve.deployment
@serve.ingress()
class Router:
    """One of N equal routers; each has its own mirror of every model's index."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, models: Sequence[tuple[dict[str, Any], DeploymentHandle]]
    ) -> None:
        """models: of each what to know of it (RouterSettings) and its replicas."""
        self._all = list[Parts]()
        id_ = uuid.uuid4().hex[:12]
        tracing.start(id_)
        for given, replicas in models:
            self._all.append(await _parts(id_, given, replicas))
        self._models = Models(id_, self._all)
        log_to_serve(self._models.only)
        await asyncio.gather(*(parts.start() for parts in self._all))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """What answers from now on; Serve asks for it after the constructor."""
        return application(self._models)

    async def check_health(self) -> None:
        """Serve replaces the router when this raises."""
        for parts in self._all:
            parts.check()

    async def __del__(self) -> None:
        """Serve's shutdown hook."""
        await asyncio.gather(*(parts.close() for parts in self._all))
        await asyncio.to_thread(tracing.close)


async def _parts(id_: str, given: dict[str, Any], replicas: DeploymentHandle) -> Parts:
    settings = RouterSettings.model_validate(given)
    folder = await asyncio.to_thread(resolve, settings.model)
    prompts = await asyncio.to_thread(Prompts, folder, settings.revision)
    return Parts(id_, settings, replicas, prompts)


def application(models: Models) -> FastAPI:
    """All routes, in front of these models."""
    http = FastAPI(title="kvroute", docs_url=None, redoc_url=None, openapi_url=None)
    http.state.models = models
    http.add_middleware(tracing.Requests)
    for kind in (openai_routes, prefix_routes, cluster_routes, ui_routes):
        http.include_router(kind.routes)
    http.exception_handler(ApiError)(_refuse)
    http.exception_handler(HTTPException)(_refuse_route)
    http.exception_handler(Exception)(_fail)
    return http


async def _refuse(request: Request, error: ApiError) -> Response:
    return Response(error.body(), error.status, media_type="application/json")


async def _refuse_route(request: Request, error: HTTPException) -> Response:
    path, method = request.url.path, request.method
    message = f"{method} {path}: {error.detail}. See GET /v1/models for what is served."
    return await _refuse(request, ApiError(error.status_code, message))


async def _fail(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    message = f"the server failed to answer; its log says why, at request {request_id(request)}"
    return await _refuse(request, ApiError(500, message, type="server_error"))
