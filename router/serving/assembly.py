"""Builds the parts of a router that serve one model, in the order of their dependencies."""

import random
from functools import partial

from msgspec.structs import replace

from kvroute.contract.adapters import digests
from kvroute.contract.identity import identify
from kvroute.features import FEATURES
from kvroute.features.expanded import Expanded
from kvroute.features.opening import Opening
from kvroute.features.own_methods import own_methods
from kvroute.features.placing_feature import PlacingFeatures
from kvroute.features.router_feature import RouterFeature
from kvroute.router.api.calls import Call
from kvroute.router.connections.deployed import DeployedReplicas
from kvroute.router.connections.links import Links
from kvroute.router.connections.liveness import Liveness
from kvroute.router.connections.peers import PeerPublisher, PeerSubscriber
from kvroute.router.connections.replica_source import ReplicaSource
from kvroute.router.connections.replica_states import StatesReader
from kvroute.router.dispatch.admission import AdmissionControl
from kvroute.router.dispatch.blamed import PoisonList
from kvroute.router.dispatch.dispatcher import Dispatcher
from kvroute.router.dispatch.questions import Questions
from kvroute.router.history.readable import readable
from kvroute.router.index.feed import Feed
from kvroute.router.index.handshake import Handshake
from kvroute.router.observability.neighbours import Neighbours
from kvroute.router.observability.observers import RequestObservers
from kvroute.router.observability.telemetry import Telemetry
from kvroute.router.placement.baselines import RANKINGS
from kvroute.router.placement.fleet import Fleet
from kvroute.router.queueing.holding import Holding, Verdict
from kvroute.router.queueing.queue import Queue
from kvroute.router.queueing.waiting_room import WaitingRoom
from kvroute.router.queueing.wake import Wake
from kvroute.router.serving.router_base import RouterBase
from kvroute.store.attached_servers import AttachedServers
from kvroute.store.clusters import Clusters

# Limit of prompt and response together in tokens, until a replica has reported its limit.
UNKNOWN_CONTEXT = 2**31


class Parts:
    """The parts of one model in one router. Lifecycle starts their tasks."""

    def __init__(self, base: RouterBase, source: ReplicaSource) -> None:
        """Build all parts.

        Args:
            base: what the parts are built on.
            source: the model's replicas.
        """
        self.base = base
        settings, redis, router_id = base.settings, base.redis, base.router_id
        model, cluster = base.model, base.cluster
        self.settings, self.tokenizer = settings, base.tokenizer
        self.unreadable, self.index = base.unreadable, base.index

        # The features that are on.
        sides = (feature.router(base) for feature in FEATURES)
        self.features = [side for side in sides if side is not None]
        self._openings = own_methods(self.features, RouterFeature.opening)
        # Path of a route -> the feature that extends it.
        self.extending = {path: side for side in self.features for path in side.extends}
        self.started = own_methods(self.features, RouterFeature.started)
        placing = PlacingFeatures(self.features, partial(self.unreadable.add, "message"))

        # The stores in Redis.
        self.attached = AttachedServers(redis, model, cluster=cluster)
        self.neighbours = Neighbours(Clusters(redis, self.unreadable), base.own)

        # The queue, and the messages between routers.
        self.queue = Queue[Verdict](lambda: self.fleet.loads.scale.busy_s)
        # These events are set when requests that wait in the queue or for a feature may proceed.
        wake, self.line_wakes = Wake(), [Wake() for _ in placing.lines]
        self.publisher = PeerPublisher(
            router_id,
            queue=self.queue,
            features=placing,
            scale=lambda: self.fleet.loads.scale.share(),
            origin=base.origin,
        )
        self.blamed = PoisonList(self.publisher.blamed)

        # The fleet, and the observers of its requests.
        self.telemetry = Telemetry(
            router_id,
            settings,
            additional=RequestObservers(self.publisher, wake, *self.line_wakes),
            features=self.features,
            ranks=lambda: len(self.liveness.trusted()),
        )
        self.fleet = Fleet(
            model=model,
            revision=settings.revision,
            block_size=settings.block_size,
            rng=random.Random(),
            handshake=_handshake(base),
            observer=self.telemetry.observer,
            ranking=RANKINGS[settings.policy](),
            running=lambda: list(source.ids()),
            features=placing,
        )
        self.feed = Feed(self.index, self.fleet)
        self.subscriber = PeerSubscriber(
            self.fleet,
            own=router_id,
            origin=base.origin,
            queue=self.queue,
            blamed=self.blamed.receive,
        )

        # The path of a request to a replica.
        self.links = Links(lambda: source, self.fleet.loads.report, tls=settings.tls)
        self.liveness = Liveness(
            lambda: source, self.links, self.fleet, hang_timeout_s=settings.hang_timeout_s
        )
        self.holding = Holding(
            self.queue,
            self.fleet,
            self.liveness.trusted,
            wake=wake,
            routers=lambda: 1 + self.subscriber.alive,
        )
        self.rooms = [
            WaitingRoom(
                line, self.fleet, busy_backlog_s=lambda: self.queue.busy_backlog_s, wake=line_wake
            )
            for line, line_wake in zip(placing.lines, self.line_wakes, strict=True)
        ]
        control = AdmissionControl(self.fleet, self.liveness, self.holding, self.rooms)
        self.questions = Questions(self.links, control)
        self.dispatcher = Dispatcher(
            self.links,
            self.fleet,
            control,
            shared_tokens=own_methods(self.features, RouterFeature.shared_tokens),
            blamed=self.blamed,
        )
        # Monitoring.
        deployed = DeployedReplicas(source.deployed)
        self.states = StatesReader(self.links, self.liveness, self.fleet, deployed)

        for side in self.features:
            side.attach(self)

    async def expand(self, call: Call) -> Expanded:
        """Return a call with what the cluster has stored for it, and the opening of its prompts.

        Its messages become readable for vLLM's application. Special tokens in the client's texts
        are escaped if --escape-special-tokens is on.

        Raises:
            ApiError: what the call names is not stored, or makes the prompt too long, or a message
                cannot be read.
        """
        side = self.extending.get(call.path)
        expanded = await side.expand(call) if side else Expanded(call)
        call = readable(expanded.call, has_more_messages=expanded.has_more_messages)
        call = await self.tokenizer.escaped(call)
        return replace(expanded, call=call, opening=await self.opening(call))

    async def opening(self, call: Call) -> Opening | None:
        """Return the beginning that a feature adds to the prompts of a call; None: there is none.

        Raises:
            ApiError: the call names a beginning that does not exist.
        """
        for opening in self._openings:
            if found := await opening(call):
                return found
        return None

    def max_model_len(self) -> int:
        """Return the most tokens that a prompt and its response may have together."""
        return self.fleet.replicas.max_model_len or UNKNOWN_CONTEXT


def _handshake(base: RouterBase) -> Handshake:
    settings = base.settings
    return Handshake(
        identify(
            base.tokenizer.model,
            revision=settings.revision,
            block_size=settings.block_size,
            variants=digests(settings.adapters),
        )
    )
