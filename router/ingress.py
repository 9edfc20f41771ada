"""HTTP: OpenAI's routes in front of the fleet, streaming, and errors in OpenAI's shape."""

import asyncio
import logging
import random
import time
from typing import Any

import ray
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from ray import serve
from ray.serve.handle import DeploymentHandle
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException

from replica.exposition import Exposition
from replica.kvindex.index import Index, connect
from replica.kvindex.prefixes import Prefix, Prefixes
from replica.model import resolve
from replica.protocol import TokenIds
from router import routes
from router.answer import answer
from router.audit import Audit, asking
from router.auto_pin import AutoPin
from router.baselines import RANKINGS
from router.demand import Demand
from router.dispatch import Dispatcher, Generation
from router.errors import ApiError
from router.feed import Feed
from router.fleet import Fleet, Witnesses
from router.hot import HotPrefixes
from router.hot_routes import HotRoutes
from router.joint import Joint
from router.metrics import RouterMetrics
from router.parsing import parse
from router.peers import Listener, Loudspeaker
from router.prefix_routes import PrefixRoutes
from router.prefixes import Catalogue
from router.prompt import Prompts
from router.request_log import RequestLog
from router.responses import ChatReply, CompletionReply, Reply
from router.routes import running_replicas
from router.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    PrefixDeclaration,
    PrefixedRequest,
)
from router.settings import RouterSettings
from router.targets import Announcer, targets
from router.watch import Watch

log = logging.getLogger("kvroute.ingress")

UNKNOWN_CONTEXT = 2**31  # tokens; until a replica has told its own
LOADED_S = 5.0  # the longest that a router waits for the index before it takes requests
CENSUS_S = 1.0  # the longest that a client waits for it

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
        self._prompts = await asyncio.to_thread(Prompts, folder)
        loudspeaker = Loudspeaker()
        self._log = self._request_log(loudspeaker.router)
        self._metrics = RouterMetrics() if self._settings.metrics else None
        self._fleet = Fleet(
            model=self._settings.served_model_name,
            revision=self._settings.revision,
            block_size=self._settings.block_size,
            rng=random.Random(),
            witness=Witnesses(*filter(None, (loudspeaker, self._log, self._metrics))),
            ranking=RANKINGS[self._settings.policy](),
        )
        watch = Watch(routes.replicas, self._fleet, hang_timeout_s=self._settings.hang_timeout_s)
        self._dispatcher = Dispatcher(replicas, self._fleet, watch)
        model, block_size = self._settings.served_model_name, self._settings.block_size
        redis = connect(self._settings.redis_url)
        self._index = Index(redis, model)
        self._feed = Feed(self._index, self._fleet)
        self._joint = Joint(self._prompts)
        self._catalogue = Catalogue(Prefixes(redis, model), self._fleet, block_size=block_size)
        self._demand = Demand(self._catalogue, self._fleet)
        self._prefixes = PrefixRoutes(
            self._catalogue, self._joint, self._index.records, block_size=block_size
        )
        self._id = loudspeaker.router
        self._audit = Audit(self._index, self._feed, self._fleet.mirror, asking(replicas))
        self._hot = HotPrefixes(block_size=block_size)
        hot = (self._hot, self._fleet, self._catalogue, self._prompts)
        self._hot_routes = HotRoutes(*hot)
        listener = Listener(self._fleet, own=loudspeaker.router)
        self._tasks = [
            asyncio.create_task(self._feed.run(), name="feed"),
            asyncio.create_task(loudspeaker.run(self._index), name="loudspeaker"),
            asyncio.create_task(listener.run(self._index), name="listener"),
            asyncio.create_task(watch.run(), name="watch"),
            asyncio.create_task(self._demand.run(), name="demand"),
            asyncio.create_task(
                self._catalogue.run(self._settings.tasks, self._joint), name="catalogue"
            ),
        ]
        if self._settings.auto_pin:
            self._tasks.append(asyncio.create_task(AutoPin(*hot).run(), name="auto-pin"))
        if self._log:
            self._tasks.append(asyncio.create_task(self._log.run(), name="request log"))
        self._announcer = await self._announce(loudspeaker.router)
        if self._announcer:
            self._tasks.append(asyncio.create_task(self._announcer.run(), name="announcer"))
        await self._feed.loaded(within_s=LOADED_S)  # so that the first request is placed well

    @http.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        body = parse(ChatCompletionRequest, await self._body(request))
        self._check_model(body.model)
        prefix = await self._prefix(body)
        prompt = await self._joint.chat(body.messages, prefix, max_model_len=self._max_model_len)
        return await self._answer(ChatReply, body, [prompt], prefix)

    @http.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        body = parse(CompletionRequest, await self._body(request))
        self._check_model(body.model)
        prefix = await self._prefix(body)
        prompts = [
            await self._joint.completion(prompt, prefix, max_model_len=self._max_model_len)
            for prompt in body.prompts()
        ]
        return await self._answer(CompletionReply, body, prompts, prefix)

    @http.post("/v1/prefixes")
    async def declare_prefix(self, request: Request) -> Response:
        declaration = parse(PrefixDeclaration, await self._body(request))
        shown, is_new = await self._prefixes.declare(declaration, max_model_len=self._max_model_len)
        return JSONResponse(shown, 201 if is_new else 200)

    @http.get("/v1/prefixes")
    async def list_prefixes(self) -> Response:
        return JSONResponse({"object": "list", "data": await self._prefixes.list()})

    @http.get("/v1/prefixes/{name:path}")
    async def get_prefix(self, name: str) -> Response:
        return JSONResponse(await self._prefixes.get(name))

    @http.delete("/v1/prefixes/{name:path}")
    async def drop_prefix(self, name: str) -> Response:
        return JSONResponse(await self._prefixes.drop(name))

    @http.get("/v1/models")
    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    @http.get("/v1/models/{name:path}")
    async def model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._model_card())

    @http.get("/health")
    async def health(self) -> Response:
        """Well as long as a replica runs: without Redis, requests are only placed less well."""
        ready, feed = len(running_replicas()), self._feed.state
        health = {
            "status": "ok" if ready else "no replica is ready",
            "replicas": ready,
            "index": {"reachable": feed.is_reachable, "age_s": round(feed.age_s, 1)},
        }
        return JSONResponse(health, 200 if ready else 503)

    @http.get("/v1/cluster")
    async def cluster(self) -> Response:
        """The replicas in the index, or those last seen there while Redis is away or slow."""
        try:
            async with asyncio.timeout(CENSUS_S):
                records, counts = await self._index.census()
        except (RedisError, OSError):
            records, counts = self._fleet.records, {}
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
                    }
                    for record in records
                ],
            }
        )

    @http.get("/v1/metrics/targets")
    async def metrics_targets(self) -> Response:
        """All processes of the cluster; 503 without Redis, where Prometheus keeps those it has."""
        try:
            found = await targets(self._index, self._settings.served_model_name)
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
            replicas = await self._audit.run()
        except (RedisError, OSError) as error:
            message = f"Redis is away ({error}), so there is nothing to compare; try again later"
            raise ApiError(503, message, type="server_error") from error
        return JSONResponse({"router": self._id, "replicas": replicas})

    @http.get("/v1/cluster/hot")
    async def hot(self) -> Response:
        """The prefixes that saved most of late, as far as this router's own requests tell."""
        return JSONResponse({"object": "list", "data": self._hot_routes.top()})

    async def check_health(self) -> None:
        """Serve replaces the router when this raises."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def __del__(self) -> None:
        """Serve's shutdown hook."""
        for task in self._tasks:
            task.cancel()
        self._prompts.close()
        if self._log:
            await self._log.flush()
        if self._announcer:
            await self._announcer.leave()

    @property
    def _max_model_len(self) -> int:
        return self._fleet.max_model_len or UNKNOWN_CONTEXT

    def _request_log(self, router: str) -> RequestLog | None:
        folder = self._settings.request_log
        if folder is None:
            return None
        return RequestLog(folder / f"{router}.jsonl", block_size=self._settings.block_size)

    async def _announce(self, router: str) -> Announcer | None:
        """Metrics are told from now on."""
        if self._metrics is None:
            return None
        self._metrics.watch(self._fleet, self._feed)
        if self._log:
            self._metrics.watch_log(self._log)
        node = ray.util.get_node_ip_address()
        exposition = await asyncio.to_thread(Exposition, node)
        return Announcer(self._index, router, exposition, node)

    def _check_model(self, name: str | None) -> None:
        served = self._settings.served_model_name
        if name not in (None, served):
            raise ApiError(
                404,
                f"The model '{name}' does not exist; this server has '{served}'.",
                param="model",
                code="model_not_found",
            )

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._settings.served_model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvroute",
            "max_model_len": self._fleet.max_model_len,
        }

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, limit_mb=self._settings.max_body_mb)

    async def _prefix(self, body: PrefixedRequest) -> Prefix | None:
        """What the request names to go on from."""
        named = body.prefix()
        return await self._catalogue.named(*named) if named else None

    async def _answer(
        self,
        shape: type[Reply],
        body: PrefixedRequest,
        prompts: list[TokenIds],
        prefix: Prefix | None,
    ) -> Response:
        def begun(generation: Generation) -> None:
            if prefix is not None:
                self._catalogue.count(prefix, generation.cached_tokens)
                self._demand.count(prefix)
            if not body.cache_salt:
                self._hot.see(
                    generation.token_ids,
                    generation.chain,
                    generation.cached_tokens,
                    time.monotonic(),
                )

        return await answer(
            self._dispatcher,
            shape,
            body,
            prompts,
            model=self._settings.served_model_name,
            max_model_len=self._max_model_len,
            begun=begun,
        )
