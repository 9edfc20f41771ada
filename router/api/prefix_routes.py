"""Named prefixes over HTTP: declared, listed, dropped."""

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from router.api.parsing import parse, read_body
from router.api.schemas import PrefixDeclaration
from router.models import Served, together

routes = APIRouter()


@routes.post("/v1/prefixes")
async def declare(request: Request, models: Served) -> Response:
    raw = await read_body(request, limit_mb=models.settings.max_body_mb)
    declaration = parse(PrefixDeclaration, raw)
    parts = models.named(declaration.model)
    limit = parts.max_model_len
    shown, is_new = await parts.prefixes.declarations.declare(declaration, max_model_len=limit)
    return JSONResponse({**shown, "model": parts.model}, 201 if is_new else 200)


@routes.get("/v1/prefixes")
async def list_prefixes(models: Served, model: str | None = None) -> Response:
    asked = models.all if model is None else [models.named(model)]
    found = await asyncio.gather(*(parts.prefixes.declarations.list() for parts in asked))
    return JSONResponse({"object": "list", "data": together(asked, found)})


@routes.get("/v1/prefixes/{name:path}")
async def get_prefix(name: str, models: Served, model: str | None = None) -> Response:
    parts = models.named(model)
    return JSONResponse({**await parts.prefixes.declarations.get(name), "model": parts.model})


@routes.delete("/v1/prefixes/{name:path}")
async def drop_prefix(name: str, models: Served, model: str | None = None) -> Response:
    return JSONResponse(await models.named(model).prefixes.declarations.drop(name))
