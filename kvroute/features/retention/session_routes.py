"""The HTTP route that ends a session."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from kvroute.features.retention.router_retention import RouterRetention
from kvroute.router.api.sessions import checked_id, session_number
from kvroute.router.middleware.caller_check import at_gate, caller_of
from kvroute.router.serving.models import Served

routes = APIRouter()

Salt = Annotated[str, Query(alias="cache_salt")]  # the namespace of the session


@routes.delete("/v1/sessions/{session_id:path}")
@routes.post("/finish_session")  # as trainers send it, with the id in the query
async def end_session(
    session_id: str, request: Request, models: Served, model: str | None = None, salt: Salt = ""
) -> Response:
    """Record that a session will send no further requests to a model, or to any model.

    An unknown session is not an error.

    Args:
        model: the model; None: all models.
        salt: the `cache_salt` of the session's requests.
    """
    checked_id("session_id", session_id)
    selected = models.all if model is None else [models.select(model)]
    number = session_number(caller_of(request).salted(salt), session_id)
    with at_gate(request):
        errors = await asyncio.gather(
            *(served.feature(RouterRetention).end(number) for served in selected)
        )
    unanswered = {rank: reason for by_rank in errors for rank, reason in by_rank.items()}
    ended = {"id": session_id, "object": "session", "deleted": True, "unanswered": unanswered}
    return JSONResponse(ended)
