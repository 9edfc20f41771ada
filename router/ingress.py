"""HTTP: OpenAI's routes in front of the fleet, our own beside them, errors in OpenAI's shape."""

import asyncio
import logging
import time
from typing import Any

import ray
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from ray import serve
from ray.serve.handle import DeploymentHandle
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException

from replica.adapters import Adapter
from replica.kvindex.prefixes import Prefix
from replica.model import resolve
from replica.protocol import TokenIds
from router.answer import answer
from router.dispatch import Generation
from router.errors import ApiError
from router.parsing import is_chat, parse
from router.parts import Parts
from router.prompt import Prompts
from router.receipts import receipt
from router.responses import ChatReply, CompletionReply, Reply
from router.routes import running_replicas
from router.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    PrefixDeclaration,
    PrefixedRequest,
)
from router.settings import RouterSettings
from router.targets import targets

log = logging.getLogger("kvroute.ingress")

UNKNOWN_CONTEXT = 2**31  # tokens; until a replica has told its own
CENSUS_S = 1.0  # the longest that a client waits for it
RECEIPT = "x-kvroute-receipt"  # header of a request that wants one

# Serve copies the app at the class below as it is then: what a route uses stands above its class.
http = FastAPI(title="kvroute", docs_url=None, redoc_url=None, openapi_url=None)


@http.exception_handler(ApiError)
async def _refuse(request: Request, error: ApiError) -> Response:
    return Response(error.body(), error.status, media_type="application/json")


@http.exception_handler(HTTPException)
async def _refuse_route(request: Request, error: HTTPException) -> Response:
    path, method = request.url.path, request.method
    message = f"{method} {path}: {error.detail}. See GET /v1/models for what is served."
    return await _refuse(request, ApiError(error.status_code, message))


@http.exception_handler(Exception)
async def _fail(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return await _refuse(
        request, ApiError(500, "the server failed to answer; see its log", type="server_error")
    )


async def read_body(request: Request, *, limit_mb: int) -> bytes:
    """The whole body. One that is too large is read to its end, so that the client, which listens
    only after it has sent everything, gets to see why it was refused."""
    limit = limit_mb << 20
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
    if size > limit:
        raise ApiError(
            413,
            f"the body has {size} bytes; the limit is {limit} ({limit_mb} MB). Send a shorter "
            "prompt, or raise KVROUTE_MAX_BODY_MB",
            code="request_too_large",
        )
    return b"".join(parts)


@serve.deployment
@serve.ingress(http)
class Router:
    """One of N equal routers; each has its own mirror of the index."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: dict[str, Any], replicas: DeploymentHandle
    ) -> None:
        self._settings = RouterSettings.model_validate(settings)
        self._started = int(time.time())
        folder = await asyncio.to_thread(resolve, self._settings.model)
        prompts = await asyncio.to_thread(Prompts, folder, self._settings.revision)
        self._parts = Parts(self._settings, replicas, prompts)
        await self._parts.start()

    @http.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        body, prompts, prefix = await self._chat(await self._body(request))
        return await self._answer(ChatReply, request, body, prompts, prefix)

    @http.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        body, prompts, prefix = await self._completion(await self._body(request))
        return await self._answer(CompletionReply, request, body, prompts, prefix)

    @http.post("/v1/route")
    async def route(self, request: Request) -> Response:
        """Where the prompts of this body would go now, and why; nothing runs."""
        raw = await self._body(request)
        body, prompts, _ = await (self._chat(raw) if is_chat(raw) else self._completion(raw))
        lora = self._lora(body.model)
        running, now_s = self._parts.watch.trusted(), time.monotonic()
        placements = [
            self._parts.fleet.place(prompt, body.cache_salt, running, now_s, lora)
            for prompt in prompts
        ]
        receipts = [receipt(each, policy=self._settings.policy) for each in placements]
        return JSONResponse({"object": "route", "router": self._parts.id, "receipts": receipts})

    @http.post("/v1/prefixes")
    async def declare_prefix(self, request: Request) -> Response:
        declaration = parse(PrefixDeclaration, await self._body(request))
        shown, is_new = await self._parts.prefix_routes.declare(
            declaration, max_model_len=self._max_model_len
        )
        return JSONResponse(shown, 201 if is_new else 200)

    @http.get("/v1/prefixes")
    async def list_prefixes(self) -> Response:
        return JSONResponse({"object": "list", "data": await self._parts.prefix_routes.list()})

    @http.get("/v1/prefixes/{name:path}")
    async def get_prefix(self, name: str) -> Response:
        return JSONResponse(await self._parts.prefix_routes.get(name))

    @http.delete("/v1/prefixes/{name:path}")
    async def drop_prefix(self, name: str) -> Response:
        return JSONResponse(await self._parts.prefix_routes.drop(name))

    @http.get("/v1/models")
    async def models(self) -> Response:
        cards = [self._model_card(), *map(self._adapter_card, self._parts.adapters.values())]
        return JSONResponse({"object": "list", "data": cards})

    @http.get("/v1/models/{name:path}")
    async def model(self, name: str) -> Response:
        lora = self._lora(name)
        adapter = self._parts.adapters.get(lora)
        return JSONResponse(self._adapter_card(adapter) if adapter else self._model_card())

    @http.get("/health")
    async def health(self) -> Response:
        """Well as long as a replica runs: without Redis, or with replicas that this router does not
        understand, requests are only placed less well."""
        ready, feed = len(running_replicas()), self._parts.feed.state
        health = {
            "status": "ok" if ready else "no replica is ready",
            "replicas": ready,
            "index": {"reachable": feed.is_reachable, "age_s": round(feed.age_s, 1)},
            "degraded": self._parts.fleet.handshake.degraded,
        }
        return JSONResponse(health, 200 if ready else 503)

    @http.get("/v1/cluster")
    async def cluster(self) -> Response:
        """The replicas in the index, or those last seen there while Redis is away or slow."""
        try:
            async with asyncio.timeout(CENSUS_S):
                records, counts = await self._parts.index.census()
        except (RedisError, OSError):
            records, counts = self._parts.fleet.records, {}
        return JSONResponse(
            {
                "model": self._settings.served_model_name,
                "ray_address": ray.get_runtime_context().gcs_address,
                "replicas": [
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
                        "degraded": self._parts.fleet.handshake.degraded.get(record.id),
                    }
                    for record in records
                ],
            }
        )

    @http.get("/v1/metrics/targets")
    async def metrics_targets(self) -> Response:
        """All processes of the cluster; 503 without Redis, where Prometheus keeps those it has."""
        try:
            found = await targets(self._parts.index, self._settings.served_model_name)
        except (RedisError, OSError) as error:
            raise ApiError(
                503, f"Redis is away ({error}); try again", type="server_error"
            ) from None
        return JSONResponse(found)

    @http.get("/metrics")
    async def metrics(self) -> Response:
        raise ApiError(
            404,
            "Every process has metrics of its own, and this address reaches one of them by chance; "
            "let Prometheus find them all: http_sd_configs with the url /v1/metrics/targets",
        )

    @http.get("/v1/cluster/audit")
    async def audit(self) -> Response:
        """This router's mirror, Redis, the replicas and their engines, compared."""
        try:
            replicas = await self._parts.audit.run()
        except (RedisError, OSError) as error:
            message = f"Redis is away ({error}), so there is nothing to compare; try again later"
            raise ApiError(503, message, type="server_error") from error
        return JSONResponse({"router": self._parts.id, "replicas": replicas})

    @http.get("/v1/cluster/hot")
    async def hot(self) -> Response:
        """The prefixes that saved most of late, as far as this router's own requests tell."""
        return JSONResponse({"object": "list", "data": self._parts.hot_routes.top()})

    async def check_health(self) -> None:
        """Serve replaces the router when this raises."""
        self._parts.check()

    async def __del__(self) -> None:
        """Serve's shutdown hook."""
        await self._parts.close()

    @property
    def _max_model_len(self) -> int:
        return self._parts.fleet.max_model_len or UNKNOWN_CONTEXT

    def _lora(self, name: str | None) -> str:
        """The LoRA adapter that a request names; empty for the model itself."""
        lora = self._parts.lora(name)
        if lora is None:
            served = (self._settings.served_model_name, *self._parts.adapters)
            raise ApiError(
                404,
                f"The model '{name}' does not exist; this server has "
                f"{' and '.join(map(repr, served))}.",
                param="model",
                code="model_not_found",
            )
        return lora

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._settings.served_model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvroute",
            "max_model_len": self._parts.fleet.max_model_len,
        }

    def _adapter_card(self, adapter: Adapter) -> dict[str, Any]:
        parent = self._settings.served_model_name
        return self._model_card() | {"id": adapter.name, "root": adapter.path, "parent": parent}

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, limit_mb=self._settings.max_body_mb)

    async def _prefix(self, body: PrefixedRequest) -> Prefix | None:
        """What the request names to go on from."""
        named = body.prefix()
        return await self._parts.catalogue.named(*named) if named else None

    async def _chat(self, raw: bytes) -> tuple[PrefixedRequest, list[TokenIds], Prefix | None]:
        """The request, its one prompt, and the named prefix that the prompt begins with."""
        body = parse(ChatCompletionRequest, raw)
        self._lora(body.model)
        prefix = await self._prefix(body)
        prompt = await self._parts.joint.chat(
            body.messages, prefix, max_model_len=self._max_model_len
        )
        return body, [prompt], prefix

    async def _completion(
        self, raw: bytes
    ) -> tuple[PrefixedRequest, list[TokenIds], Prefix | None]:
        """The same, with as many prompts as the request has."""
        body = parse(CompletionRequest, raw)
        self._lora(body.model)
        prefix = await self._prefix(body)
        prompts = [
            await self._parts.joint.completion(prompt, prefix, max_model_len=self._max_model_len)
            for prompt in body.prompts()
        ]
        return body, prompts, prefix

    async def _answer(
        self,
        shape: type[Reply],
        request: Request,
        body: PrefixedRequest,
        prompts: list[TokenIds],
        prefix: Prefix | None,
    ) -> Response:
        lora = self._lora(body.model)

        def begun(generation: Generation) -> None:
            self._parts.count(generation, prefix, is_apart=bool(body.cache_salt or lora))

        wants_receipt = request.headers.get(RECEIPT, "0") not in ("0", "")
        return await answer(
            self._parts.dispatcher,
            shape,
            body,
            prompts,
            model=self._settings.served_model_name,
            lora=lora,
            max_model_len=self._max_model_len,
            begun=begun,
            receipt=self._receipt if wants_receipt else None,
        )

    def _receipt(self, generation: Generation) -> dict[str, Any]:
        """Of a prompt that is being answered."""
        return receipt(generation.placement, policy=self._settings.policy) | {
            "replica": generation.replica_id,
            "expected_tokens": generation.expected_tokens,
            "cached_tokens": generation.cached_tokens,
        }
