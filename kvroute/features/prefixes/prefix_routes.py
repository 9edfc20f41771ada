"""HTTP routes that declare, list and drop named prefixes."""

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvroute.features.prefixes.declaration import PrefixDeclaration
from kvroute.features.prefixes.declarations import Declarations
from kvroute.features.prefixes.router_prefixes import RouterPrefixes
from kvroute.router.api.bodies import BodyReader
from kvroute.router.middleware.caller_check import caller_of
from kvroute.router.serving.model_router import ModelRouter
from kvroute.router.serving.models import Served, label_by_model

routes = APIRouter()


@routes.post("/v1/prefixes")
async def declare(request: Request, models: Served, bodies: BodyReader) -> Response:
    """Declare a prefix. The status is 201 if this creates a new version, else 200."""
    declaration = await bodies.parsed(PrefixDeclaration, request)
    model = models.select(declaration.model)
    prefix, is_new = await _of(model).declare(
        declaration, caller_of(request), max_model_len=model.max_model_len()
    )
    return JSONResponse({**prefix, "model": model.name}, 201 if is_new else 200)


@routes.get("/v1/prefixes")
async def list_prefixes(request: Request, models: Served, model: str | None = None) -> Response:
    """Return the prefixes that the client may use, of `model` or of all models."""
    selected = models.all if model is None else [models.select(model)]
    prefixes = await asyncio.gather(*(_of(served).list(caller_of(request)) for served in selected))
    return JSONResponse({"object": "list", "data": label_by_model(selected, prefixes)})


@routes.get("/v1/prefixes/{name:path}")
async def get_prefix(
    name: str, request: Request, models: Served, model: str | None = None
) -> Response:
    """Return one prefix."""
    selected = models.select(model)
    return JSONResponse(
        {
            **await _of(selected).get(name, caller_of(request)),
            "model": selected.name,
        }
    )


@routes.delete("/v1/prefixes/{name:path}")
async def drop_prefix(
    name: str, request: Request, models: Served, model: str | None = None
) -> Response:
    """Drop all versions of a prefix."""
    return JSONResponse(await _of(models.select(model)).drop(name, caller_of(request)))


def _of(model: ModelRouter) -> Declarations:
    return model.feature(RouterPrefixes).declarations
