"""HTTP: OpenAI's routes in front of the fleet, our own beside them, errors in OpenAI's shape."""

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import ray
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException

from replica.adapters import Adapter
from replica.kvindex.index import connect
from replica.kvindex.prefixes import Prefix
from replica.logs import log_to_serve
from replica.model import resolve
from replica.protocol import TokenIds
from router import tracing
from router.answer import answer
from router.diagnosis import Diagnosis
from router.dispatch import Generation
from router.errors import ApiError, invalid
from router.live import Live
from router.parsing import is_chat, parse
from router.parts import Parts
from router.prompt import Prompts
from router.receipts import receipt
from router.request_id import request_id
from router.responses import ChatReply, CompletionReply, Reply
from router.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    PrefixDeclaration,
    PrefixedRequest,
)
from router.settings import RouterSettings
from router.targets import targets
from router.trips import Asked
from router.ui_routes import PAGE, file, read_files

log = logging.getLogger("kvroute.ingress")

CENSUS_S = 1.0  # the longest that a client waits for it
RECEIPT = "x-kvroute-receipt"  # header of a request that wants one

# Serve copies the app at the class below as it is then: what a route uses stands above its class.
http = FastAPI(title="kvroute", docs_url=None, redoc_url=None, openapi_url=None)
http.add_middleware(tracing.Requests)


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
    message = f"the server failed to answer; its log says why, at request {request_id(request)}"
    return await _refuse(request, ApiError(500, message, type="server_error"))


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


def _together(
    models: Iterable[Parts], answers: Iterable[Iterable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The models' answers as one list, each entry with the model that it belongs to."""
    pairs = zip(models, answers, strict=True)
    return [{**entry, "model": parts.model} for parts, answer in pairs for entry in answer]


def _adapter(adapter: Adapter, *, parent: str) -> dict[str, Any]:
    """What its card has besides the model's."""
    return {"id": adapter.name, "root": adapter.path, "parent": parent}


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


@serve.deployment
@serve.ingress(http)
class Router:
    """One of N equal routers; each has its own mirror of every model's index."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, models: Sequence[tuple[dict[str, Any], DeploymentHandle]]
    ) -> None:
        """models: of each what to know of it (RouterSettings) and its replicas."""
        self._id = uuid.uuid4().hex[:12]
        self._started = int(time.time())
        self._models: dict[str, Parts] = {}  # by the name that clients know
        tracing.start(self._id)
        for given, replicas in models:
            settings = RouterSettings.model_validate(given)
            folder = await asyncio.to_thread(resolve, settings.model)
            prompts = await asyncio.to_thread(Prompts, folder, settings.revision)
            parts = Parts(self._id, settings, replicas, prompts)
            self._models[parts.model] = parts
        log_to_serve(parts.model if len(self._models) == 1 else None)
        self._settings = settings  # what all models have in common is in any of them
        self._diagnosis = Diagnosis(connect(settings.redis_url), self._models.values())
        self._ui_files = await asyncio.to_thread(read_files)
        await asyncio.gather(*(parts.start() for parts in self._models.values()))

    @http.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        with self._counting_refusals(request):
            body, prompts, prefix = await self._chat(request, await self._body(request))
            return await self._answer(ChatReply, request, body, prompts, prefix)

    @http.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        with self._counting_refusals(request):
            body, prompts, prefix = await self._completion(request, await self._body(request))
            return await self._answer(CompletionReply, request, body, prompts, prefix)

    @http.post("/v1/route")
    async def route(self, request: Request) -> Response:
        """Where the prompts of this body would go now, and why; nothing runs."""
        raw = await self._body(request)
        read = self._chat if is_chat(raw) else self._completion
        body, prompts, _ = await read(request, raw)
        parts: Parts = request.state.parts
        lora = parts.lora(body.model) or ""
        running, now_s = parts.watch.trusted(), time.monotonic()
        placements = [
            parts.fleet.place(prompt, body.cache_salt, running, now_s, lora) for prompt in prompts
        ]
        receipts = [receipt(each, policy=self._settings.policy) for each in placements]
        return JSONResponse({"object": "route", "router": self._id, "receipts": receipts})

    @http.post("/v1/prefixes")
    async def declare_prefix(self, request: Request) -> Response:
        declaration = parse(PrefixDeclaration, await self._body(request))
        parts = self._parts(declaration.model)
        shown, is_new = await parts.prefix_routes.declare(
            declaration, max_model_len=parts.max_model_len
        )
        return JSONResponse({**shown, "model": parts.model}, 201 if is_new else 200)

    @http.get("/v1/prefixes")
    async def list_prefixes(self, model: str | None = None) -> Response:
        asked = self._models.values() if model is None else [self._parts(model)]
        found = await asyncio.gather(*(parts.prefix_routes.list() for parts in asked))
        return JSONResponse({"object": "list", "data": _together(asked, found)})

    @http.get("/v1/prefixes/{name:path}")
    async def get_prefix(self, name: str, model: str | None = None) -> Response:
        parts = self._parts(model)
        return JSONResponse({**await parts.prefix_routes.get(name), "model": parts.model})

    @http.delete("/v1/prefixes/{name:path}")
    async def drop_prefix(self, name: str, model: str | None = None) -> Response:
        return JSONResponse(await self._parts(model).prefix_routes.drop(name))

    @http.get("/v1/models")
    async def models(self) -> Response:
        cards = [card for parts in self._models.values() for card in self._model_cards(parts)]
        return JSONResponse({"object": "list", "data": cards})

    @http.get("/v1/models/{name:path}")
    async def model(self, name: str) -> Response:
        parts = self._parts(name)
        lora = parts.lora(name) or parts.model
        (card,) = (each for each in self._model_cards(parts) if each["id"] == lora)
        return JSONResponse(card)

    @http.get("/health")
    async def health(self) -> Response:
        """Well as long as a replica of any model runs: a load balancer that looked away would take
        the other models' requests along. Without Redis, or with replicas that this router does not
        understand, requests are only placed less well."""
        ready = {name: len(parts.running) for name, parts in self._models.items()}
        feeds = [parts.feed.state for parts in self._models.values()]
        degraded = [parts.fleet.handshake.degraded for parts in self._models.values()]
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

    @http.get("/v1/cluster")
    async def cluster(self) -> Response:
        """The replicas in the index, or those last seen there while Redis is away or slow."""
        models = self._models.values()
        replicas = await asyncio.gather(*(_census(parts) for parts in models))
        return JSONResponse(
            {
                "model": next(iter(self._models)) if len(self._models) == 1 else None,
                "ray_address": ray.get_runtime_context().gcs_address,
                "replicas": _together(models, replicas),
            }
        )

    @http.get("/v1/metrics/targets")
    async def metrics_targets(self) -> Response:
        """All processes of the cluster; 503 without Redis, where Prometheus keeps those it has."""
        try:
            found = await asyncio.gather(
                *(targets(parts.index, model) for model, parts in self._models.items())
            )
        except (RedisError, OSError) as error:
            raise ApiError(
                503, f"Redis is away ({error}); try again", type="server_error"
            ) from None
        return JSONResponse(list(chain.from_iterable(found)))

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
            models = self._models.values()
            audits = await asyncio.gather(*(parts.audit.run() for parts in models))
        except (RedisError, OSError) as error:
            message = f"Redis is away ({error}), so there is nothing to compare; try again later"
            raise ApiError(503, message, type="server_error") from error
        return JSONResponse({"router": self._id, "replicas": _together(models, audits)})

    @http.post("/v1/cluster/canary")
    async def canary(self) -> Response:
        """A tiny request of our own to every replica, and whether its blocks were seen."""
        models = self._models.values()
        found = await asyncio.gather(*(parts.canaries.run() for parts in models))
        return JSONResponse({"router": self._id, "replicas": _together(models, found)})

    @http.get("/v1/cluster/diagnosis")
    async def diagnosis(self, request: Request) -> Response:
        """Redis, the leases, Serve and the versions, as this router sees them."""
        _, port = request.scope["server"]
        return JSONResponse({"router": self._id} | await self._diagnosis.run(port=port))

    @http.get("/v1/cluster/hot")
    async def hot(self) -> Response:
        """The prefixes that saved most of late, as far as this router's own requests tell."""
        models = self._models.values()
        found = _together(models, [parts.hot_routes.top() for parts in models])
        found.sort(key=lambda hot: -hot["tokens_saved_per_s"])
        return JSONResponse({"object": "list", "data": found})

    @http.get("/v1/cluster/live")
    async def live(self, model: str | None = None) -> Response:
        """What the live page shows of a model, or of the first, as server-sent events."""
        events = await self._live(model).listen()
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(events, headers=headers, media_type="text/event-stream")

    @http.get("/ui")
    async def ui(self) -> Response:
        return await self.ui_file(PAGE)

    @http.get("/ui/{name}")
    async def ui_file(self, name: str) -> Response:
        self._live(None)
        return file(self._ui_files, name)

    async def check_health(self) -> None:
        """Serve replaces the router when this raises."""
        for parts in self._models.values():
            parts.check()

    async def __del__(self) -> None:
        """Serve's shutdown hook."""
        await asyncio.gather(*(parts.close() for parts in self._models.values()))
        await asyncio.to_thread(tracing.close)

    def _live(self, model: str | None) -> Live:
        live = self._parts(model or next(iter(self._models))).live
        if live is None:
            raise ApiError(404, "the live page is off (--no-ui); start with --ui, or KVROUTE_UI=1")
        return live

    @contextmanager
    def _counting_refusals(self, request: Request) -> Iterator[None]:
        """An error that leaves the block is what a client gets. One that came before its model was
        known counts for the first model."""
        try:
            yield
        except Exception as error:
            first = next(iter(self._models.values()))
            getattr(request.state, "parts", first).refused(error)
            raise

    def _parts(self, model: str | None) -> Parts:
        """Those of the model that a request names, or whose adapter it names. It may leave the name
        out where there is one model only. ApiError for one that is not served."""
        if model is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        names = [name for parts in self._models.values() for name in (parts.model, *parts.adapters)]
        served = " and ".join(map(repr, names))
        if model is None:
            raise invalid("model", f"model is missing; this server has {served}")
        for parts in self._models.values():
            if parts.lora(model) is not None:
                return parts
        raise ApiError(
            404,
            f"The model '{model}' does not exist; this server has {served}.",
            param="model",
            code="model_not_found",
        )

    def _model_cards(self, parts: Parts) -> list[dict[str, Any]]:
        """A model, and its adapters."""
        card = {
            "id": parts.model,
            "object": "model",
            "created": self._started,
            "owned_by": "kvroute",
            "max_model_len": parts.fleet.max_model_len,
        }
        adapters = parts.adapters.values()
        return [card, *(card | _adapter(each, parent=parts.model) for each in adapters)]

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, limit_mb=self._settings.max_body_mb)

    async def _prefix(self, parts: Parts, body: PrefixedRequest) -> Prefix | None:
        """What the request names to go on from."""
        named = body.prefix()
        return await parts.catalogue.named(*named) if named else None

    async def _chat(
        self, request: Request, raw: bytes
    ) -> tuple[PrefixedRequest, list[TokenIds], Prefix | None]:
        """What is asked, its one prompt, and the named prefix that the prompt begins with. From
        now on the request's state has the model's parts."""
        body = parse(ChatCompletionRequest, raw)
        request.state.parts = parts = self._parts(body.model)
        prefix = await self._prefix(parts, body)
        with tracing.step("tokenise"):
            prompt = await parts.joint.chat(
                body.messages, prefix, max_model_len=parts.max_model_len
            )
        return body, [prompt], prefix

    async def _completion(
        self, request: Request, raw: bytes
    ) -> tuple[PrefixedRequest, list[TokenIds], Prefix | None]:
        """The same, with as many prompts as the request has."""
        body = parse(CompletionRequest, raw)
        request.state.parts = parts = self._parts(body.model)
        prefix = await self._prefix(parts, body)
        limit = parts.max_model_len
        with tracing.step("tokenise"):
            prompts = [
                await parts.joint.completion(prompt, prefix, max_model_len=limit)
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
        parts: Parts = request.state.parts
        asked = Asked(
            time.monotonic(),
            request_id(request),
            choices=body.n,
            namespace=body.cache_salt,
            lora=parts.lora(body.model) or "",
            named_tokens=parts.named_tokens(prefix),
        )

        def begun(generation: Generation) -> None:
            parts.count(generation, prefix, is_apart=bool(asked.namespace or asked.lora))

        wants_receipt = request.headers.get(RECEIPT, "0") not in ("0", "")
        return await answer(
            parts.dispatcher,
            shape,
            body,
            prompts,
            asked,
            model=parts.model,
            max_model_len=parts.max_model_len,
            begun=begun,
            receipt=self._receipt if wants_receipt else None,
        )

    def _receipt(self, generation: Generation) -> dict[str, Any]:
        """Of a prompt that is being answered."""
        return receipt(generation.placement, policy=self._settings.policy) | {
            "request_id": generation.request_id,
            "replica": generation.replica_id,
            "expected_tokens": generation.expected_tokens,
            "cached_tokens": generation.cached_tokens,
        }
