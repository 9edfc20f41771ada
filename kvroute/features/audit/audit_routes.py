"""The HTTP routes that audit all replicas, and send them canaries."""

import asyncio

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from kvroute.features.audit import AUDIT, CANARY
from kvroute.features.audit.router_audits import RouterAudits
from kvroute.router.api.errors import needing_redis
from kvroute.router.serving.models import Served, label_by_model

routes = APIRouter()


@routes.get(AUDIT)
async def audit(models: Served) -> Response:
    """Compare this router's mirror, its copy of the index, with Redis and the replicas' engines."""
    with needing_redis():
        audits = [model.feature(RouterAudits).run() for model in models.all]
        replicas = label_by_model(models.all, await asyncio.gather(*audits))
    return JSONResponse({"router": models.router_id, "replicas": replicas})


@routes.post(CANARY)
async def canary(models: Served) -> Response:
    """Send a tiny request to every replica; report whether its blocks appear in the index."""
    canaries = [model.feature(RouterAudits).canaries.run() for model in models.all]
    replicas = label_by_model(models.all, await asyncio.gather(*canaries))
    return JSONResponse({"router": models.router_id, "replicas": replicas})
