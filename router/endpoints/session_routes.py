"""The HTTP route that ends a conversation. Its salt is the query's `cache_salt`."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from kvroute.keys.keyring import salted
from kvroute.router.api.sessions import checked_id, session_number
from kvroute.router.endpoints.limited import entered, leaving
from kvroute.router.middleware.access import caller_of
from kvroute.router.serving.models import Served

routes = APIRouter()

Salt = Annotated[str, Query(alias="cache_salt")]


@routes.delete("/v1/sessions/{session_id:path}")
async def end_session(
    session_id: str, request: Request, models: Served, model: str | None = None, salt: Salt = ""
) -> Response:
    """No further turn will come, of any model if none is named. It may be unknown."""
    checked_id("session_id", session_id)
    selected = models.all if model is None else [models.named(model)]
    number = session_number(salted(caller_of(request), salt), session_id)
    with leaving(entered(request)):
        found = await asyncio.gather(*(each.requests.end_session(number) for each in selected))
    unanswered = {replica_id: why for each in found for replica_id, why in each.items()}
    ended = {"id": session_id, "object": "session", "deleted": True, "unanswered": unanswered}
    return JSONResponse(ended)
