"""The HTTP routes for operators: health, replicas, diagnosis, metrics."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvroute.process import vllm_build
from kvroute.router.api.errors import ApiError, needing_redis
from kvroute.router.serving.diagnosis import versions
from kvroute.router.serving.models import Served, label_by_model
from kvroute.router.serving.status import STATUS_S, ModelHealth, Status, feature_states
from kvroute.store.connection import REDIS_ERRORS

routes = APIRouter()


@routes.get("/ping")  # the route that SageMaker uses
@routes.post("/ping")
@routes.get("/health")
async def health(request: Request, models: Served) -> Response:
    """Return status 200 if at least one replica of any model is ready, else 503.

    If only one of several models has no replica, load balancers must not remove this router, since
    it serves the other models. The status is also 200 if Redis cannot be reached, or if the router
    has to ignore the caches of some replicas (the degraded ones): requests are still served, with
    fewer cache hits. A stopping router returns 503, so that load balancers send no further requests
    to it.
    """
    healths = await asyncio.gather(*(model.status.health() for model in models.all))
    connected = sum(health.connected for health in healths)
    is_stopping = request.app.state.answers.is_stopping
    problem = "stopping" if is_stopping else "" if connected else "no replica is ready"
    names = [model.name for model in models.all]
    body = {
        "status": problem or "ok",
        **_replicas(healths),
        "models": {
            name: health.replicas.ready for name, health in zip(names, healths, strict=True)
        },
        "index": _index(healths),
        "unconnected": dict(chain.from_iterable(health.unconnected.items() for health in healths)),
        "degraded": dict(chain.from_iterable(health.degraded.items() for health in healths)),
    }
    return JSONResponse(body, 503 if problem else 200)


def _replicas(healths: Sequence[ModelHealth]) -> dict[str, Any]:
    """Return how many replicas are ready and wanted, and the state of each that is missing."""
    states = [health.replicas for health in healths]
    wanted = [each.wanted for each in states if each.wanted is not None]
    return {
        "replicas": sum(each.ready for each in states),
        "wanted": sum(wanted) if len(wanted) == len(states) else None,
        "missing": dict(chain.from_iterable(each.missing.items() for each in states)),
    }


def _index(healths: Sequence[ModelHealth]) -> dict[str, Any]:
    """Return whether Redis can be used, and how old this router's copy of the index is."""
    return {
        "reachable": all(health.index_is_reachable for health in healths),
        "writable": all(health.index_is_writable for health in healths),
        "age_s": round(max(health.index_age_s for health in healths), 1),
    }


@routes.get("/version")
async def version() -> Response:
    """Return vLLM's version in the format of vLLM's server; null if vLLM is not installed."""
    return JSONResponse({"version": vllm_build.installed_version() or None})


@routes.get("/v1/cluster")
async def cluster(request: Request, models: Served) -> Response:
    """Return the replicas in the index, and this router's recent requests, queues and features.

    If Redis does not answer in time, the response has the replicas that were read last. The queues
    of other routers come from their latest reports.
    """
    replicas, healths, servers = await asyncio.gather(  # side by side, since Redis can be slow
        asyncio.gather(*(model.status.replicas() for model in models.all)),
        asyncio.gather(*(model.status.health() for model in models.all)),
        asyncio.gather(*(_lost_servers(model.status) for model in models.all)),
    )
    return JSONResponse(
        {
            "version": versions()["kvroute"],
            "stopping": request.app.state.answers.is_stopping,
            "model": models.only,
            "ray_address": models.first.base.surroundings.cluster_address,
            "index": _index(healths),
            "fleets": [
                {"model": model.name, **_replicas([health])}
                for model, health in zip(models.all, healths, strict=True)
            ],
            "replicas": label_by_model(models.all, replicas),
            "servers": label_by_model(models.all, servers),
            "recent": [model.status.recent() for model in models.all],
            "queues": [model.status.queue() for model in models.all],
            **feature_states(model.status for model in models.all),
        }
    )


async def _lost_servers(status: Status) -> list[dict[str, str]]:
    """Return the attached servers to which no requests can be sent; none if Redis is away."""
    with suppress(*REDIS_ERRORS):
        async with asyncio.timeout(STATUS_S):
            lost = await status.lost_servers()
        return [{"server": url, "problem": problem} for url, problem in sorted(lost.items())]
    return []


@routes.get("/v1/cluster/diagnosis")
async def diagnosis(request: Request, models: Served) -> Response:
    """Return the facts for `kvroute doctor`, as this router sees them."""
    _, port = request.scope["server"]
    findings = await models.diagnosis.run(port=port, gate=request.app.state.gate)
    findings |= await request.app.state.services.facts()
    return JSONResponse({"router": models.router_id} | findings)


@routes.get("/v1/metrics/targets")
async def metrics_targets(models: Served) -> Response:
    """Return the addresses of all processes' metrics.

    Without Redis, return status 503, so that Prometheus keeps the list that it read last.
    """
    with needing_redis():
        targets = await asyncio.gather(*(model.status.metrics_targets() for model in models.all))
    return JSONResponse(list(chain.from_iterable(targets)))


@routes.get("/metrics")
async def metrics() -> Response:
    """Refuse a scrape of the router's address, and explain how to configure Prometheus."""
    raise ApiError(
        404,
        "Every process has metrics of its own, and this address would return those of a random "
        "router. Configure Prometheus to find all processes: set http_sd_configs to the url "
        "/v1/metrics/targets",
    )
