"""The parts of one router that serve one model, each built from those above it."""

import random
from functools import partial

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from redis.asyncio import Redis

from kvroute.contract.identity import identify
from kvroute.contract.unreadable import Unreadable
from kvroute.router.accounting.lasting_accounts import LastingAccounts
from kvroute.router.admission.limits import Limits
from kvroute.router.admission.seats import Seats
from kvroute.router.connections import replicas as serves
from kvroute.router.connections.links import Links
from kvroute.router.connections.liveness import Liveness
from kvroute.router.connections.peers import PeerPublisher, PeerSubscriber
from kvroute.router.dispatch.admission import Gate
from kvroute.router.dispatch.blamed import PoisonList
from kvroute.router.dispatch.dispatcher import Dispatcher
from kvroute.router.dispatch.ended_sessions import EndedSessions
from kvroute.router.dispatch.questions import Questions
from kvroute.router.index.feed import Feed
from kvroute.router.index.handshake import Handshake
from kvroute.router.observability.audit import Audit, audit_reader
from kvroute.router.observability.canary import Canaries, canary_sender
from kvroute.router.observability.neighbours import Neighbours
from kvroute.router.observability.telemetry import Telemetry
from kvroute.router.placement.attempts import RequestObservers
from kvroute.router.placement.baselines import RANKINGS
from kvroute.router.placement.fleet import Fleet
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.router.queueing.holding import Answer, Holding
from kvroute.router.queueing.queue import Queue
from kvroute.router.queueing.seating import Answer as Seat
from kvroute.router.queueing.seating import Seating
from kvroute.router.queueing.wake import Wake
from kvroute.router.serving.conversations import Conversations
from kvroute.router.serving.prefix_service import PrefixService
from kvroute.settings.router import RouterSettings
from kvroute.store.accounts import DailyAccounts
from kvroute.store.clusters import ClusterModel, Clusters
from kvroute.store.connection import connect
from kvroute.store.index import Index
from kvroute.store.prefixes import Prefixes
from kvroute.store.responses import Responses

UNKNOWN_CONTEXT = 2**31  # tokens; used until a replica has reported its own


class Parts:
    """Builds the parts, and starts none of them."""

    def __init__(
        self,
        router_id: str,
        settings: RouterSettings,
        replicas: DeploymentHandle,
        tokenizer: Prompts,
        limits: Limits | None = None,
    ) -> None:
        """Build all parts.

        Args:
            router_id: id of this router.
            settings: the settings for this model.
            replicas: handle of the model's replicas.
            tokenizer: the model's tokenizer and template.
            limits: limits of tenants, if this model's channel carries their counts to other
                routers.
        """
        deployment = replicas.deployment_name
        self._handle = replicas.options()  # from now on, Serve publishes which replicas it runs
        running = partial(serves.running_replicas, deployment)
        known = partial(serves.replicas, deployment)
        self.settings = settings
        self.tokenizer = tokenizer
        self.unreadable = Unreadable()

        # What is in Redis.
        redis = connect(settings.redis_url)
        model, cluster = settings.served_model_name, settings.cluster
        self.index = Index(redis, model, cluster=cluster, unreadable=self.unreadable)
        self.neighbours = Neighbours(Clusters(redis, self.unreadable), _tenant(settings))
        self.accounts = _accounts(settings, redis, self.unreadable, router_id)
        self.responses = _responses(settings, redis, self.unreadable)
        self.conversations = (
            Conversations(self.responses, max_bytes=settings.max_body_mb << 20)
            if self.responses
            else None
        )

        # What waits, and what the routers tell each other.
        self.queue = Queue[Answer](lambda: self.fleet.loads.scale.busy_s)
        self.seats = _seats(settings, self)
        self.seat_wake, wake = Wake(), Wake()
        self.publisher = PeerPublisher(
            router_id,
            limits=limits,
            queue=self.queue,
            seats=self.seats,
            scale=lambda: self.fleet.loads.scale.share(),
        )
        self.blamed = PoisonList(self.publisher.blamed)

        # The fleet, and what follows its requests.
        self.ended_sessions = EndedSessions()
        self.telemetry = Telemetry(
            router_id,
            settings,
            also=RequestObservers(self.publisher, wake, self.seat_wake, self.ended_sessions),
            lasting=self.accounts,
        )
        self.fleet = Fleet(
            model=model,
            revision=settings.revision,
            block_size=settings.block_size,
            rng=random.Random(),
            handshake=_handshake(settings, tokenizer),
            observer=self.telemetry.observer,
            ranking=RANKINGS[settings.policy](),
            running=running,
            seats=self.seats,
        )
        self.feed = Feed(self.index, self.fleet)
        self.subscriber = PeerSubscriber(
            self.fleet,
            own=router_id,
            limits=limits,
            queue=self.queue,
            blamed=self.blamed.receive,
        )

        # The way of a request to a replica.
        self.links = Links(known, self.fleet.loads.report)
        self.liveness = Liveness(
            known, self.links, self.fleet, hang_timeout_s=settings.hang_timeout_s
        )
        store = Prefixes(redis, model, cluster=cluster, unreadable=self.unreadable)
        self.prefixes = PrefixService(settings, store, self.index, self.fleet, tokenizer)
        self.holding = Holding(
            self.queue,
            self.fleet,
            self.liveness.trusted,
            wake=wake,
            routers=lambda: 1 + self.subscriber.alive,
        )
        self.seating = _seating(settings, self)
        gate = Gate(self.fleet, self.liveness, self.holding, self.seating)
        self.questions = Questions(self.links, gate)
        self.dispatcher = Dispatcher(
            self.links,
            self.fleet,
            gate,
            shared_tokens=self.prefixes.catalogue.shared_tokens,
            blamed=self.blamed,
        )
        # What watches them.
        read_audit = audit_reader(self.links, self.unreadable)
        self.audit = Audit(self.index, self.feed, self.fleet.mirror, read_audit)
        self.canaries = Canaries(
            self.index,
            self.fleet,
            canary_sender(self.links),
            self.links.running,
            block_size=settings.block_size,
        )

    def max_model_len(self) -> int:
        """Return the most tokens of prompt and response together."""
        return self.fleet.replicas.max_model_len or UNKNOWN_CONTEXT


def _tenant(settings: RouterSettings) -> ClusterModel:
    return ClusterModel(
        settings.cluster,
        settings.served_model_name,
        ray.get_runtime_context().gcs_address,
        serve.get_replica_context().app_name,
    )


def _responses(settings: RouterSettings, redis: Redis, unreadable: Unreadable) -> Responses | None:
    """Return the store of responses; None: responses are not stored."""
    if not settings.response_store_mb:
        return None
    return Responses(
        redis,
        settings.served_model_name,
        limit_bytes=settings.response_store_mb << 20,
        ttl_s=settings.response_ttl_s,
        max_bytes=settings.max_body_mb << 20,
        cluster=settings.cluster,
        unreadable=unreadable,
    )


def _accounts(
    settings: RouterSettings, redis: Redis, unreadable: Unreadable, router_id: str
) -> LastingAccounts | None:
    """Return the accounts of tenants; None: there are no API keys."""
    if settings.api_keys is None:
        return None
    store = DailyAccounts(
        redis, settings.served_model_name, cluster=settings.cluster, unreadable=unreadable
    )
    return LastingAccounts(store, router_id)


def _handshake(settings: RouterSettings, tokenizer: Prompts) -> Handshake:
    return Handshake(
        identify(
            tokenizer.model,
            revision=settings.revision,
            block_size=settings.block_size,
            adapters=settings.adapters,
        )
    )


def _seats(settings: RouterSettings, parts: Parts) -> Seats[Seat] | None:
    """Return the seats; None: any number of sessions may be active.

    Policies other than kvroute's do not use the caches, so they need no seats.
    """
    most = settings.max_sessions
    if most == "off" or (most == "auto" and settings.policy != "kvroute"):
        return None
    return Seats(lambda: parts.fleet.cache_tokens, None if most == "auto" else most)


def _seating(settings: RouterSettings, parts: Parts) -> Seating | None:
    """Return the wait for seats; None: sessions need no seats."""
    if parts.seats is None:
        return None
    return Seating(
        parts.seats,
        parts.fleet,
        hold_s=lambda: parts.queue.hold_s,
        most_s=settings.max_seat_wait_s,
        wake=parts.seat_wake,
    )
