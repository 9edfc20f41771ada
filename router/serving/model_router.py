"""Serves one model in one router: it owns the parts, and offers what the routes need."""

import asyncio
import datetime
import random
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from fastapi import Response
from ray import serve
from ray.serve.handle import DeploymentHandle
from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvroute.blocks.chain import Scope
from kvroute.contract.identity import identify
from kvroute.contract.ranks import replicas_of
from kvroute.contract.records import ReplicaRecord
from kvroute.contract.unreadable import Unreadable
from kvroute.keys.keyring import salted, tenant_of
from kvroute.process.draining import draining
from kvroute.router.accounting.accounts import as_json
from kvroute.router.accounting.lasting_accounts import LastingAccounts
from kvroute.router.admission.limits import Entry, Limits
from kvroute.router.admission.queue import Queue
from kvroute.router.admission.seats import Seats
from kvroute.router.admission.waits import AT_EASE, Urgency
from kvroute.router.api.calls import PASSED_ON, Call
from kvroute.router.api.errors import ApiError
from kvroute.router.api.load_report import load_of
from kvroute.router.api.scoring import Scoring, completion
from kvroute.router.api.urgency import sharer_of
from kvroute.router.connections import replicas as serves
from kvroute.router.connections.links import Links
from kvroute.router.connections.liveness import Liveness
from kvroute.router.dispatch.blamed import Blamed
from kvroute.router.dispatch.dispatcher import Dispatcher, Generation
from kvroute.router.dispatch.ended_sessions import EndedSessions, end_session
from kvroute.router.dispatch.holding import Answer, Holding, Wake
from kvroute.router.dispatch.relay import whole_response
from kvroute.router.dispatch.seating import Answer as Seat
from kvroute.router.dispatch.seating import Seating
from kvroute.router.index.feed import Feed
from kvroute.router.index.handshake import Handshake
from kvroute.router.observability import request_spans
from kvroute.router.observability.audit import Audit, audit_reader
from kvroute.router.observability.canary import Canaries, canary_sender
from kvroute.router.observability.neighbours import Neighbours
from kvroute.router.observability.targets import Target, targets
from kvroute.router.observability.telemetry import Telemetry
from kvroute.router.page import seats_now, waiting
from kvroute.router.page.live import Live
from kvroute.router.page.recent import Sums
from kvroute.router.page.view import View
from kvroute.router.placement.attempts import RequestContext, RequestObserver, RequestObservers
from kvroute.router.placement.baselines import RANKINGS
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.peers import PeerPublisher, PeerSubscriber
from kvroute.router.placement.receipts import receipt
from kvroute.router.prefixes.hot import Owner
from kvroute.router.prompts.conversation import conversation
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.router.serving.calls import Calls, Prompted, RefusedCallError, placed_by
from kvroute.router.serving.conversations import Conversations, asked
from kvroute.router.serving.prefix_service import PrefixService
from kvroute.router.serving.scored import scored_prompts
from kvroute.router.serving.stored_response import stored
from kvroute.router.sessions.breaks import Break, told_apart
from kvroute.router.sessions.chats import Chats
from kvroute.router.sessions.returns import NOTHING_SAID, Said
from kvroute.router.sessions.volatile import CONTEXT_TOKENS, MOST_TOKENS, kind_of
from kvroute.settings.router import RouterSettings
from kvroute.store.accounts import DailyAccounts
from kvroute.store.clusters import Clusters, Tenant
from kvroute.store.connection import connect
from kvroute.store.index import Index
from kvroute.store.prefixes import Prefix, Prefixes
from kvroute.store.responses import Responses

UNKNOWN_CONTEXT = 2**31  # tokens; used until a replica has reported its own
LOADED_S = 5.0  # the longest wait of a new router until its mirror is loaded
STATUS_S = 1.0  # the longest that a client waits for the replicas' status


@dataclass(frozen=True, slots=True)
class ModelHealth:
    ready: int  # replicas that take requests
    index_is_reachable: bool
    index_is_writable: bool  # a Redis without memory can be read only
    index_age_s: float  # since the router's mirror was last equal to the index
    degraded: dict[str, str]  # replica id -> why
    unconnected: dict[str, str]  # replica id -> why the router has no connection to it


class ModelRouter:
    """One model's router. Its tasks run from `start` to `close`."""

    def __init__(
        self,
        router_id: str,
        settings: RouterSettings,
        replicas: DeploymentHandle,
        tokenizer: Prompts,
        limits: Limits | None = None,
    ) -> None:
        """limits: of tenants, if this model's channel tells the other routers of them."""
        redis = connect(settings.redis_url)
        self.name = settings.served_model_name
        self.settings = settings
        self._adapters = frozenset(adapter.name for adapter in settings.adapters)  # LoRA
        self._deployment = replicas.deployment_name
        self._handle = replicas.options()  # from now on, Serve tells which replicas it runs
        self._tokenizer = tokenizer
        self._unreadable = unreadable = Unreadable()
        self._index = Index(redis, self.name, cluster=settings.cluster, unreadable=unreadable)
        self._neighbours = Neighbours(Clusters(redis, unreadable), _tenant(settings))
        self._queue = queue = Queue[Answer](lambda: self._fleet.scale.busy_s)
        wake, self._seat_wake = Wake(), Wake()
        self._seats = seats = _seats(settings, lambda: self._fleet.cache_tokens)
        self._publisher = PeerPublisher(
            router_id,
            limits=limits,
            queue=queue,
            seats=seats,
            scale=lambda: self._fleet.scale.share(),
        )
        self._accounts = _accounts(settings, redis, unreadable, router_id)
        self._ended_sessions = EndedSessions()
        also = RequestObservers(self._publisher, wake, self._seat_wake, self._ended_sessions)
        self._telemetry = Telemetry(router_id, settings, also=also, lasting=self._accounts)
        running = partial(serves.running_replicas, self._deployment)
        self._chats = Chats()
        self._fleet = _fleet(settings, tokenizer, self._telemetry.observer, running, seats)
        self._feed = Feed(self._index, self._fleet)
        self._blamed = Blamed(self._publisher.blamed)
        self._subscriber = PeerSubscriber(
            self._fleet, own=router_id, limits=limits, queue=queue, blamed=self._blamed.hear
        )
        known = partial(serves.replicas, self._deployment)
        self._links = Links(known, self._fleet.told)
        self._liveness = Liveness(
            known, self._links, self._fleet, hang_timeout_s=settings.hang_timeout_s
        )
        store = Prefixes(redis, self.name, cluster=settings.cluster, unreadable=unreadable)
        self.prefixes = PrefixService(settings, store, self._index, self._fleet, tokenizer)
        self.holding = Holding(
            *(queue, self._fleet, self._liveness.trusted),
            wake=wake,
            routers=lambda: 1 + self._subscriber.alive,
        )
        self._seating = self._new_seating()
        self._dispatcher = Dispatcher(
            *(self._links, self._fleet, self._liveness, self.holding),
            shared_tokens=self.prefixes.catalogue.shared_tokens,
            blamed=self._blamed,
            seating=self._seating,
        )
        self._calls = Calls(
            self._dispatcher, self._fleet, self.prefixes, lambda: self.max_model_len
        )
        self._responses = _responses(settings, redis, unreadable)
        self.conversations = _conversations(settings, self._responses)
        read_audit = audit_reader(self._links, unreadable)
        self._audit = Audit(self._index, self._feed, self._fleet.mirror, read_audit)
        self._canaries = Canaries(
            *(self._index, self._fleet, canary_sender(self._links), self._links.running),
            block_size=settings.block_size,
        )
        self.live = self._live() if settings.ui else None  # None: it is off
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when the mirror is loaded, so that placement is good, or after LOADED_S."""
        catalogue = self.prefixes.catalogue
        await self._telemetry.start(
            self._index,
            fleet=self._fleet,
            feed=self._feed,
            catalogue=catalogue,
            audit=self._audit,
            unreadable=self._unreadable,
            links=self._links,
            blamed=self._blamed,
            responses=self._responses,
            queue=self._queue,
            seats=self._seats,
        )
        self._run("feed", self._feed.run())
        self._run("peer publisher", self._publisher.run(self._index, self._subscriber))
        self._run("peer subscriber", self._subscriber.run(self._index))
        self._run("links", self._links.run())
        self._run("liveness", self._liveness.run())
        self._run("holding", self.holding.run())
        if self._seating is not None:
            self._run("seating", self._seating.run())
        self._run("neighbours", self._neighbours.run())
        self._run("ended sessions", self._ended_sessions.run(self._links))
        for name, work in (self.prefixes.tasks() | self._telemetry.tasks()).items():
            self._run(name, work)
        await self._feed.loaded(within_s=LOADED_S)

    def check(self) -> None:
        """Raises the error that ended a task, if one has ended; none should."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tokenizer.close()
        await self._neighbours.leave()
        await self._telemetry.close()

    # Requests.

    @property
    def names(self) -> list[str]:
        """All by which clients can name it or its adapters."""
        adapters = self._adapters
        return [self.name, *adapters, *(f"{self.name}:{adapter}" for adapter in adapters)]

    def adapter(self, model: str | None) -> str | None:
        """The LoRA adapter that a client names as `adapter` or `model:adapter`. Empty: the model
        itself. None: not served here."""
        if model in (None, self.name):
            return ""
        name = model.removeprefix(f"{self.name}:")
        return name if name in self._adapters else None

    async def answer(
        self,
        call: Call,
        *,
        request_id: str,
        with_receipts: bool,
        prefix_name: str | None,
        entry: Entry | None = None,
        urgency: Urgency = AT_EASE,
        said: Said = NOTHING_SAID,
        still_waiting: Callable[[], Awaitable[None]] | None = None,
    ) -> Response:
        """The response to a call that a replica's HTTP application answers. ApiError,
        OverLimitError.

        prefix_name: of the header, if there is one. entry: into the tenant's limits.
        still_waiting: see RequestContext.
        """
        try:
            response = await self._answer(
                call,
                request_id=request_id,
                with_receipts=with_receipts,
                prefix_name=prefix_name,
                entry=entry,
                urgency=urgency,
                said=said,
                still_waiting=still_waiting,
            )
        except RefusedCallError as error:
            response = whole_response(error.refusal, path=call.path)
        if response.status_code >= 400:
            if entry is not None:
                entry.give_back(time.monotonic())
            self.refused(ApiError(response.status_code, "", code="refused_by_engine"))
        return response

    async def _answer(
        self,
        call: Call,
        *,
        request_id: str,
        with_receipts: bool,
        prefix_name: str | None,
        entry: Entry | None,
        urgency: Urgency,
        said: Said,
        still_waiting: Callable[[], Awaitable[None]] | None,
    ) -> Response:
        """The same. RefusedCallError."""
        if call.path in PASSED_ON:
            call = await self._tokenizer.escaped(call)
            counted = call.as_generating()
            prefix = await self._prefix_of(call, prefix_name) if counted else None
            if counted is not None and prefix is not None:
                return await self._calls.counted(call, counted, prefix)
            return await self._calls.passed_on(call, request_id)
        sharer = sharer_of(call.caller, call.body.get("user"))
        self.holding.check(urgency, sharer)
        turn = await asked(call, self.conversations)
        call = await self._tokenizer.escaped(turn.call)
        prefix = await self._prefix_of(call, prefix_name)
        with request_spans.step("tokenise"):
            prompted = await self._calls.prompts(call, prefix)
        if entry is not None:
            entry.take(sum(map(len, prompted.token_ids)))
        context = RequestContext(
            time.monotonic(),
            request_id,
            choices=call.n,
            prompts=len(prompted.token_ids),
            namespace=call.cache_salt,
            tenant=tenant_of(call.caller),
            entry=entry,
            lora=self.adapter(call.model) or "",
            named_tokens=(
                self.prefixes.named_tokens(prefix, call.cache_salt) if call.reads_cache else 0
            ),
            broken=self._broken(call, prefix, prompted, self._chats.see),
            features=placed_by(call, prompted),
            urgency=urgency,
            sharer=sharer,
            said=said,
            still_waiting=still_waiting,
        )
        response = await self._calls.respond(
            call,
            prompted,
            context,
            begun=partial(self._begun, context, prefix, _owner(call, context)),
            receipt=partial(self._receipt, broken=context.broken) if with_receipts else None,
        )
        return await stored(turn, response)

    def _begun(
        self,
        context: RequestContext,
        prefix: Prefix | None,
        owner: Owner | None,
        prompt: Generation,
    ) -> None:
        """A prompt has its first token."""
        self.prefixes.count(prompt, prefix, owner)
        if (entry := context.entry) is not None:
            new_tokens = max(0, len(prompt.token_ids) - prompt.cached_tokens)
            entry.computed(prompt.request_id, new_tokens, time.monotonic())

    def _broken(
        self,
        call: Call,
        prefix: Prefix | None,
        prompted: Prompted,
        compare: Callable[..., Break | None],
    ) -> Break | None:
        """What broke the prompt's prefix since the chat's earlier turn; None if it is no chat."""
        messages = conversation(call.path, call.body)
        if messages is None:
            return None
        name = prefix.id if prefix else ""
        scope = f"{self.adapter(call.model)}|{name}|{call.cache_salt}"
        ids = told_apart(prompted.token_ids[0], prompted.features)
        found = compare(messages, ids, tools=call.body.get("tools"), scope=scope)
        if found and found.difference.after.tokens <= MOST_TOKENS:
            around = found.difference.around(CONTEXT_TOKENS)
            text = self._tokenizer.decode(prompted.token_ids[0][around])
            found = replace(found, kind=kind_of(text))
        return found

    async def _prefix_of(self, call: Call, name: str | None) -> Prefix | None:
        named = call.prefix() or (("x-kvroute-prefix", name) if name else None)
        return await self.prefixes.catalogue.named(*named, call.caller) if named else None

    async def explain(
        self, call: Call, said: Said = NOTHING_SAID, *, prefix_name: str | None = None
    ) -> list[dict[str, Any]]:
        """Where each prompt of a call would go now, and why; nothing is generated. prefix_name: of
        the header, if there is one. RefusedCallError."""
        call = await self._tokenizer.escaped((await asked(call, self.conversations)).call)
        prefix = await self._prefix_of(call, prefix_name)
        prompted = await self._calls.prompts(call, prefix)
        broken = self._broken(call, prefix, prompted, self._chats.look)
        salt, lora = call.cache_salt, self.adapter(call.model) or ""
        features = placed_by(call, prompted)
        receipts = []
        for prompt in prompted.token_ids:
            running, now_s = self._liveness.trusted(), time.monotonic()
            shared_tokens = self._dispatcher.shared_tokens(prompt, salt, features)
            scope = Scope(lora, salt, shared_tokens)
            placement = self._fleet.place(prompt, running, now_s, scope, features)
            retention = self._fleet.retention(placement, said)
            policy = self.settings.policy
            receipts.append(receipt(placement, policy=policy, broken=broken, retention=retention))
            await asyncio.sleep(0)  # other requests come first
        return receipts

    async def scoring(self, scoring: Scoring, raw: bytes) -> Call:
        """Return the completion that answers a request for scores; raw: its body. ApiError."""
        length = self.max_model_len
        prompts = await scored_prompts(scoring, self._tokenizer, max_model_len=length)
        return completion(scoring, raw, prompts)

    async def end_session(self, session: int) -> dict[str, str]:
        """A client says that no further turn will come. Returns the ranks that do not know it, and
        why."""
        self._fleet.end_session(session)
        self._seat_wake.ring()
        self._publisher.session_ended(session)
        if not self._fleet.returns.believes_ends:
            return {}
        return await end_session(self._links, session)

    def refused(self, error: Exception) -> None:
        """A client got this error instead of a response."""
        self._telemetry.refused(error)

    def over_limit(self, tenant: str, limit: str) -> None:
        """A client was refused for that limit of its tenant."""
        self._telemetry.over_limit(tenant, limit)

    # Status.

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and response together."""
        return self._fleet.max_model_len or UNKNOWN_CONTEXT

    @property
    def known_max_model_len(self) -> int | None:
        """The same; None until a replica has reported it."""
        return self._fleet.max_model_len

    @property
    def running(self) -> list[str]:
        """Ids of the ranks that can get a request now."""
        return self._liveness.running()

    def health(self) -> ModelHealth:
        feed, degraded = self._feed.state, self._fleet.handshake.degraded
        return ModelHealth(
            len(replicas_of(self.running)),
            index_is_reachable=feed.is_reachable,
            index_is_writable=self._neighbours.can_write,
            index_age_s=feed.age_s,
            degraded=dict(degraded),
            unconnected=self._links.unconnected(),
        )

    async def replicas(self) -> list[dict[str, Any]]:
        """Every replica in the index; those last seen there while Redis is away or slow."""
        try:
            async with asyncio.timeout(STATUS_S):
                records, counts = await self._index.replica_status()
        except (RedisError, OSError):
            records, counts = self._fleet.records, {}
        return [self._status(record, counts.get(record.id)) for record in records]

    async def audit(self) -> list[dict[str, Any]]:
        """Engine, replica, Redis and mirror compared. RedisError or OSError without Redis."""
        return await self._audit.run()

    async def canary(self) -> list[dict[str, Any]]:
        """The result of a tiny request to each replica."""
        return await self._canaries.run()

    async def metrics_targets(self) -> list[Target]:
        """The addresses of its processes' metrics. RedisError or OSError without Redis."""
        return await targets(self._index, self.name)

    async def tenants(self, days: Iterable[datetime.date]) -> list[dict[str, Any]]:
        """What each tenant used on these days. ApiError without API keys; RedisError or OSError
        without Redis."""
        if self._accounts is None:
            raise ApiError(
                404,
                "there are accounts of tenants only where API keys are needed: kvroute serve "
                "--api-keys FILE",
            )
        found = await self._accounts.of_days(days)
        return [as_json(tenant, account) for tenant, account in found.items()]

    async def leases_s(self) -> dict[str, float]:
        """The remaining time of each replica's lease. RedisError or OSError without Redis."""
        return await self._index.leases_s()

    async def clusters(self) -> dict[str, Any]:
        """This cluster and others that serve the model through this Redis. RedisError or OSError
        without Redis."""
        return await self._neighbours.report()

    def unreadable(self) -> list[dict[str, Any]]:
        """Records that were skipped since they could not be read, one entry for each kind."""
        return [
            {"model": self.name, "kind": kind, **summary}
            for kind, summary in self._unreadable.report().items()
        ]

    def rendering_differences(self) -> dict[str, int]:
        """Prompts that routers have rendered in another way than vLLM, by replica."""
        return {each.id: each.load.rendering_differences for each in self._fleet.own_records}

    def backlogs_s(self) -> dict[str, float]:
        """Prefill queued or running on each replica."""
        running = self.running
        return dict(zip(running, self._fleet.backlogs_s(running, time.monotonic()), strict=True))

    def slow_replicas(self) -> dict[str, float]:
        """Return the replicas that are far slower than the others, and how many times."""
        return self._fleet.slow_replicas(self.running)

    def queue(self) -> dict[str, Any]:
        """What waits in this router and, as far as it knows, in all; and who waited lately."""
        now = waiting.as_json(self._queue, time.monotonic())
        return {"model": self.name, **now, "recent": self._telemetry.recent_waits.as_json()}

    def seats(self) -> list[dict[str, Any]]:
        """Return the state of the sessions' seats; nothing where sessions need none."""
        if self._seats is None:
            return []
        now = seats_now.as_json(self._seats, time.monotonic())
        return [{"model": self.name, **now}]

    def load(self) -> dict[str, float]:
        """Return the load of all replicas and of this router's queue, under vLLM's names."""
        queued = sum(state.requests for state in self.holding.states().values())
        return load_of(self._fleet.records, queued=queued)

    def blamed(self) -> list[dict[str, Any]]:
        """Requests that stopped a replica and are refused for some minutes."""
        return [{"model": self.name, **each} for each in self._blamed.as_json()]

    def recent_sums(self) -> list[Sums]:
        """The sums over the prompts of the last minutes, for each replica."""
        return list(self._telemetry.recent.window.sums().values())

    def broken_places(self) -> list[dict[str, Any]]:
        """Where chats changed in the same time, the costliest first."""
        return [{**place, "model": self.name} for place in self._telemetry.places.worst()]

    def _status(self, record: ReplicaRecord, blocks: int | None) -> dict[str, Any]:
        return {
            "id": record.id,
            "pid": record.whereabouts.pid,
            "incarnation": record.incarnation,
            "node": record.whereabouts.node,
            "block_size": record.facts.block_size,
            "blocks": blocks,
            "capacity_blocks": record.facts.capacity_blocks,
            "running": record.load.running,
            "waiting": record.load.waiting,
            "loras": record.load.loras,
            "degraded": self._fleet.handshake.degraded.get(record.id),
            "tool_parser": record.facts.tool_parser,
            "reasoning_parser": record.facts.reasoning_parser,
        } | self._host_tier(record)

    def _host_tier(self, record: ReplicaRecord) -> dict[str, Any]:
        tier = self._fleet.host_tier(record.id)
        return {"host": tier} if tier else {}

    def _receipt(self, generation: Generation, broken: Break | None) -> dict[str, Any]:
        """The receipt of a prompt in generation."""
        return receipt(
            generation.placement,
            policy=self.settings.policy,
            broken=broken,
            retention=generation.retention,
        ) | {
            "request_id": generation.request_id,
            "replica": generation.replica_id,
            "expected_tokens": generation.expected_tokens,
            "cached_tokens": generation.cached_tokens,
            "queued_s": round(generation.wait.waited_s, 3),
            "queued_for": generation.wait.reason,
            "seat_s": round(generation.wait.seat_s, 3),
        }

    def _new_seating(self) -> Seating | None:
        """None: sessions need no seats."""
        if self._seats is None:
            return None
        return Seating(
            self._seats,
            self._fleet,
            hold_s=lambda: self._queue.hold_s,
            most_s=self.settings.max_seat_wait_s,
            wake=self._seat_wake,
        )

    def _live(self) -> Live:
        view = View(
            self._telemetry.recent,
            self.settings,
            places=self._telemetry.places,
            index=self._index,
            fleet=self._fleet,
            feed=self._feed,
            liveness=self._liveness,
            hottest=self.prefixes.hottest,
            queue=self.queue,
            seats=self.seats,
            peers=self._subscriber,
        )
        return Live(view.snapshot, draining)

    def _run(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))


def _owner(call: Call, context: RequestContext) -> Owner | None:
    """Whose hot prefixes a prompt counts for. None: it has a salt of its own, or an adapter."""
    salt = salted(call.caller, "")
    is_isolated = context.lora or context.namespace != salt
    return None if is_isolated else Owner(context.tenant, salt)


def _tenant(settings: RouterSettings) -> Tenant:
    return Tenant(
        settings.cluster,
        settings.served_model_name,
        ray.get_runtime_context().gcs_address,
        serve.get_replica_context().app_name,
    )


def _responses(settings: RouterSettings, redis: Redis, unreadable: Unreadable) -> Responses | None:
    """None: none is stored."""
    if not settings.response_store_mb:
        return None
    return Responses(
        redis,
        settings.served_model_name,
        limit_bytes=settings.response_store_mb << 20,
        ttl_s=settings.response_ttl_s,
        most_bytes=settings.max_body_mb << 20,
        cluster=settings.cluster,
        unreadable=unreadable,
    )


def _accounts(
    settings: RouterSettings, redis: Redis, unreadable: Unreadable, router_id: str
) -> LastingAccounts | None:
    """None without API keys: there are no tenants."""
    if settings.api_keys is None:
        return None
    store = DailyAccounts(
        redis, settings.served_model_name, cluster=settings.cluster, unreadable=unreadable
    )
    return LastingAccounts(store, router_id)


def _conversations(settings: RouterSettings, store: Responses | None) -> Conversations | None:
    """None: none is stored."""
    if store is None:
        return None
    return Conversations(store, most_bytes=settings.max_body_mb << 20)


def _fleet(
    settings: RouterSettings,
    tokenizer: Prompts,
    observer: RequestObserver,
    running: Callable[[], Collection[str]],
    seats: Seats[Any] | None,
) -> Fleet:
    identity = identify(
        tokenizer.model,
        revision=settings.revision,
        block_size=settings.block_size,
        adapters=settings.adapters,
    )
    return Fleet(
        model=settings.served_model_name,
        revision=settings.revision,
        block_size=settings.block_size,
        rng=random.Random(),
        handshake=Handshake(identity),
        observer=observer,
        ranking=RANKINGS[settings.policy](),
        running=running,
        seats=seats,
    )


def _seats(settings: RouterSettings, capacity_tokens: Callable[[], int]) -> Seats[Seat] | None:
    """None: any number of sessions may be active. Other policies do not use what is cached."""
    most = settings.max_sessions
    if most == "off" or (most == "auto" and settings.policy != "kvroute"):
        return None
    return Seats(capacity_tokens, None if most == "auto" else most)
