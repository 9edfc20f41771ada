"""The HTTP application of a router, with all routes."""

from fastapi import APIRouter, FastAPI, Request, Response

from kvroute.features import FEATURES
from kvroute.features.router_service import RouterServices
from kvroute.router.api.bodies import Bodies
from kvroute.router.api.errors import ApiError, path_of, response
from kvroute.router.endpoints import (
    cluster_routes,
    docs_routes,
    openai_routes,
)
from kvroute.router.middleware.caller_check import CallerCheck
from kvroute.router.middleware.known_routes import KnownRoutes
from kvroute.router.middleware.open_requests import OpenLimit
from kvroute.router.middleware.origins import guard
from kvroute.router.middleware.stopping import LastAnswers, RunningAnswers
from kvroute.router.observability import request_spans
from kvroute.router.serving.models import Models

ROUTE_MODULES = (  # the modules with HTTP routes of the core
    *(openai_routes, cluster_routes, docs_routes),
)


def core_routes() -> list[APIRouter]:
    """Return the HTTP routes of the core."""
    return [module.routes for module in ROUTE_MODULES]


def feature_routes() -> list[APIRouter]:
    """Return the HTTP routes of all features."""
    return [routes for feature in FEATURES for routes in feature.routes()]


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
