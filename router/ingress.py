"""The Serve deployment of a router, and its HTTP application with all routes."""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from ray import serve
from ray.serve.handle import DeploymentHandle

from kvroute.features import FEATURES
from kvroute.features.gate import Gate
from kvroute.features.router_service import RouterServices
from kvroute.process.builtin_model import resolve
from kvroute.process.draining import draining
from kvroute.process.logs import log_to_serve
from kvroute.process.ray_internals import listen_on_node_address
from kvroute.router.api.bodies import Bodies
from kvroute.router.api.errors import ApiError, path_of, response
from kvroute.router.endpoints import (
    cluster_routes,
    docs_routes,
    openai_routes,
)
from kvroute.router.middleware.caller_check import CallerCheck, gate_of
from kvroute.router.middleware.known_routes import KnownRoutes
from kvroute.router.middleware.open_requests import OpenLimit
from kvroute.router.middleware.origins import guard
from kvroute.router.middleware.stopping import LastAnswers, RunningAnswers
from kvroute.router.observability import request_spans
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.router.serving.assembly import Parts
from kvroute.router.serving.model_router import ModelRouter
from kvroute.router.serving.models import Models
from kvroute.router.serving.router_base import RouterBase, router_base
from kvroute.settings.router import RouterSettings

log = logging.getLogger("kvroute.ingress")

# Unfinished answers are ended with an error this many seconds before Serve ends a router.
LAST_ERRORS_S = 1.0

ROUTE_MODULES = (  # the modules with HTTP routes of the core
    *(openai_routes, cluster_routes, docs_routes),
)


def core_routes() -> list[APIRouter]:
    """Return the HTTP routes of the core."""
    return [module.routes for module in ROUTE_MODULES]


def feature_routes() -> list[APIRouter]:
    """Return the HTTP routes of all features."""
    return [routes for feature in FEATURES for routes in feature.routes()]


@serve.deployment
@serve.ingress()
class Router:
    """One of several equal routers. Each has its own copy of every model's index in memory."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, models: Sequence[tuple[dict[str, Any], Sequence[DeploymentHandle]]]
    ) -> None:
        """Start the router.

        Args:
            models: for each model, its settings (RouterSettings) and the handle of each deployment
                of its replicas.
        """
        listen_on_node_address()
        self._all = list[ModelRouter]()
        self._answers = RunningAnswers()
        id_ = uuid.uuid4().hex[:12]
        request_spans.start(id_)
        settings = [RouterSettings.model_validate(values) for values, _ in models]
        gate = await asyncio.to_thread(gate_of, settings[0])
        for model_settings, (_, replicas) in zip(settings, models, strict=True):
            self._all.append(await _model_router(id_, model_settings, replicas, gate))
        self._models = Models(id_, self._all)
        base = self._models.first.base
        self._services = await asyncio.to_thread(_services, base)
        self._bodies = Bodies(limit_mb=self._models.settings.max_body_mb)
        drain_s = self._models.settings.drain_timeout_s
        self._ending = asyncio.create_task(self._end_before_serve(drain_s))
        log_to_serve(self._models.only)
        await asyncio.gather(*(model.lifecycle.start() for model in self._all))
        readings = self._models.first.telemetry.readings
        self._services.start(readings)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP application. Serve calls this after the constructor."""
        return application(
            self._models,
            self._bodies,
            answers=self._answers,
            services=self._services,
        )

    async def stop(self) -> int:
        """Refuse new requests from now on, and return the number of running answers.

        `kvroute serve` calls this through Serve when it shuts down.
        """
        running = self._answers.stop()
        await self._services.stop()
        return running

    async def end_answers(self) -> None:
        """End all running answers with an error."""
        self._answers.end()

    async def check_health(self) -> None:
        """Raise the error of a background task that has ended. Serve then replaces the router."""
        for model in self._all:
            model.lifecycle.check()
        self._services.check()

    async def __del__(self) -> None:
        """Close the router; Serve calls this at shutdown."""
        self._ending.cancel()
        await self._services.stop()
        self._services.close()
        await asyncio.gather(
            self._bodies.close(), *(model.lifecycle.close() for model in self._all)
        )
        await asyncio.to_thread(request_spans.close)

    async def _end_before_serve(self, drain_s: float) -> None:
        """While Serve drains the router: end its work before Serve ends the router.

        Args:
            drain_s: seconds that Serve waits before it ends the router.
        """
        await draining()
        await self._services.stop()
        await asyncio.sleep(max(0.0, drain_s - LAST_ERRORS_S))
        self._answers.end()


def _services(base: RouterBase) -> RouterServices:
    services = (feature.service(base) for feature in FEATURES)
    return RouterServices(service for service in (base.gate, *services) if service is not None)


async def _model_router(
    id_: str,
    settings: RouterSettings,
    replicas: Sequence[DeploymentHandle],
    gate: Gate,
) -> ModelRouter:
    """Load the model's tokenizer, and return its router."""
    folder = await asyncio.to_thread(resolve, settings.model)
    load = partial(Prompts, escapes=settings.escapes_special_tokens)
    tokenizer = await asyncio.to_thread(load, folder, settings.revision, settings.engine_args)
    return ModelRouter(Parts(router_base(id_, settings, tokenizer, gate), replicas))


def application(
    models: Models,
    bodies: Bodies,
    *,
    answers: RunningAnswers | None = None,
    services: RouterServices | None = None,
) -> FastAPI:
    """Return an application with all routes for these models.

    Args:
        answers: the running answers, which end when the router stops.
    """
    answers = answers or RunningAnswers()
    http = FastAPI(title="kvroute", docs_url=None, redoc_url=None, openapi_url=None)
    http.state.models = models
    http.state.bodies = bodies
    http.state.answers = answers
    http.state.gate = gate = models.first.base.gate
    http.state.services = services = services or RouterServices()
    services.attach(http)
    # Requests that are refused before their model is known count for the first model.
    refused = models.first.telemetry.refused
    http.add_middleware(request_spans.Requests)
    http.add_middleware(OpenLimit, limit=models.settings.max_requests, refused=refused)
    http.add_middleware(LastAnswers, answers=answers, refused=refused)
    if not gate.is_open:
        http.add_middleware(CallerCheck, gate=gate, refused=refused)
    for routes in core_routes() + feature_routes():
        http.include_router(routes)
    http.add_middleware(KnownRoutes, routes=http.routes)
    guard(
        http,
        allowed=models.settings.allow_origin,
        local_only=models.settings.local_only,
        refused=refused,
    )
    http.exception_handler(ApiError)(_refuse)
    http.exception_handler(Exception)(_fail)
    return http


async def _refuse(request: Request, error: ApiError) -> Response:
    return response(error, path=path_of(request.scope))


async def _fail(request: Request, error: Exception) -> Response:
    return await _refuse(request, openai_routes.failure(request, error))
