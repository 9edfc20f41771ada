"""The HTTP route that ends a session; the parameter `cache_salt` is the session's namespace."""

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
    """Record that the session sends no more requests, to all models or to the one named.

    An unknown session is no error.
    """
    checked_id("session_id", session_id)
    selected = models.all if model is None else [models.named(model)]
    number = session_number(salted(caller_of(request), salt), session_id)
    with leaving(entered(request)):
        errors = await asyncio.gather(*(served.requests.end_session(number) for served in selected))
    unanswered = {replica_id: why for of_model in errors for replica_id, why in of_model.items()}
    ended = {"id": session_id, "object": "session", "deleted": True, "unanswered": unanswered}
    return JSONResponse(ended)
