"""The cluster's routes: its health, what it consists of, and whether it is as it should be."""

import asyncio
from itertools import chain
from typing import Any

import ray
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError

from router.api.errors import ApiError, needing_redis
from router.insight.targets import targets
from router.models import Served, together
from router.parts import Parts

CENSUS_S = 1.0  # the longest that a client waits for it

routes = APIRouter()


@routes.get("/health")
async def health(models: Served) -> Response:
    """Well as long as a replica of any model runs: a load balancer that looked away would take the
    other models' requests along. Without Redis, or with replicas that this router does not
    understand, requests are only placed less well."""
    ready = {parts.model: len(parts.running) for parts in models.all}
    feeds = [parts.feed.state for parts in models.all]
    degraded = [parts.fleet.handshake.degraded for parts in models.all]
    health = {
        "status": "ok" if any(ready.values()) else "no replica is ready",
        "replicas": sum(ready.values()),
        "models": ready,
        "index": {
            "reachable": all(feed.is_reachable for feed in feeds),
            "age_s": round(max(feed.age_s for feed in feeds), 1),
        },
        "degraded": dict(chain.from_iterable(each.items() for each in degraded)),
    }
    return JSONResponse(health, 200 if any(ready.values()) else 503)


@routes.get("/v1/cluster")
async def cluster(models: Served) -> Response:
    """The replicas in the index, or those last seen there while Redis is away or slow."""
    replicas = await asyncio.gather(*map(_census, models.all))
    return JSONResponse(
        {
            "model": models.only,
            "ray_address": ray.get_runtime_context().gcs_address,
            "replicas": together(models.all, replicas),
        }
    )


@routes.get("/v1/cluster/audit")
async def audit(models: Served) -> Response:
    """This router's mirror, Redis, the replicas and their engines, compared."""
    with needing_redis():
        audits = await asyncio.gather(*(parts.audit.run() for parts in models.all))
    replicas = together(models.all, audits)
    return JSONResponse({"router": models.router_id, "replicas": replicas})


@routes.post("/v1/cluster/canary")
async def canary(models: Served) -> Response:
    """A tiny request of our own to every replica, and whether its blocks were seen."""
    found = await asyncio.gather(*(parts.canaries.run() for parts in models.all))
    replicas = together(models.all, found)
    return JSONResponse({"router": models.router_id, "replicas": replicas})


@routes.get("/v1/cluster/diagnosis")
async def diagnosis(request: Request, models: Served) -> Response:
    """Redis, the leases, Serve and the versions, as this router sees them."""
    _, port = request.scope["server"]
    found = await models.diagnosis.run(port=port)
    return JSONResponse({"router": models.router_id} | found)


@routes.get("/v1/cluster/hot")
async def hot(models: Served) -> Response:
    """The prefixes that saved most of late, as far as this router's own requests tell."""
    found = together(models.all, [parts.prefixes.hottest.top() for parts in models.all])
    found.sort(key=lambda hot: -hot["tokens_saved_per_s"])
    return JSONResponse({"object": "list", "data": found})


@routes.get("/v1/metrics/targets")
async def metrics_targets(models: Served) -> Response:
    """All processes of the cluster; 503 without Redis, where Prometheus keeps those it has."""
    with needing_redis():
        found = await asyncio.gather(*(targets(parts.index, parts.model) for parts in models.all))
    return JSONResponse(list(chain.from_iterable(found)))


@routes.get("/metrics")
async def metrics() -> Response:
    raise ApiError(
        404,
        "Every process has metrics of its own, and this address reaches one of them by chance; "
        "let Prometheus find them all: http_sd_configs with the url /v1/metrics/targets",
    )


async def _census(parts: Parts) -> list[dict[str, Any]]:
    """A model's replicas."""
    try:
        async with asyncio.timeout(CENSUS_S):
            records, counts = await parts.index.census()
    except (RedisError, OSError):
        records, counts = parts.fleet.records, {}
    return [
        {
            "id": record.id,
            "pid": record.facts["pid"],
            "incarnation": record.incarnation,
            "node": record.facts["node"],
            "block_size": record.facts["block_size"],
            "blocks": counts.get(record.id),
            "capacity_blocks": record.facts["capacity_blocks"],
            "running": record.load["running"],
            "waiting": record.load["waiting"],
            "loras": record.load.get("loras", []),
            "degraded": parts.fleet.handshake.degraded.get(record.id),
        }
        for record in records
    ]
