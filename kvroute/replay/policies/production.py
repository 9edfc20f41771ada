"""The policies of a replay: kvroute's production code, and models of other routers.

Each policy knows only what a real router knows: the index, with its delay, and its own requests.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import DISK, HOST
from kvroute.contract.generation import NO_TOKENS, Chunk, GenerateRequest
from kvroute.contract.keep import SESSION_BITS, hash_number
from kvroute.contract.messages import RouterMessage
from kvroute.contract.priority import BATCH_S
from kvroute.contract.records import EngineFacts, Load, ReplicaRecord
from kvroute.features import FEATURES
from kvroute.features.line import Line
from kvroute.features.placing_feature import PlacingFeatures
from kvroute.replay.policies.dynamo import Dynamo, DynamoShortestFirst
from kvroute.replay.policies.llm_d import (
    LlmD,
    LlmDBlend,
    LlmDBlendSpeculative,
    LlmDRequests,
)
from kvroute.replay.policies.policy_protocol import (
    LoadReport,
    Policy,
    PolicyDecision,
    Setup,
)
from kvroute.replay.policies.rivals import (
    Baseline,
    ConsistentHash,
    LMetric,
    SGLang,
    StickyLeastLoaded,
)
from kvroute.replay.workload.trace import Request
from kvroute.replica.fabric.pull import Exchanging, Pull, PullResult, carried, carried_in
from kvroute.router.connections.peers import PeerPublisher, PeerSubscriber
from kvroute.router.placement.attempts import Attempt, Placement, RequestContext
from kvroute.router.placement.baselines import RANKINGS
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.policy import Candidate
from kvroute.router.placement.waits import DEFAULT_URGENCY, Urgency
from kvroute.router.queueing.queue import Queue, QueuedRequest
from kvroute.router.sessions.turns import SessionHints

BATCH = Urgency("batch")


class Production:
    """kvroute: fleet, queue, features and messages of a real router, on the clock of the replay."""

    report_s = 0.25  # seconds between two reports: REPORT_INTERVAL_S in replica/engine_server.py
    report_age_s = 0.002  # seconds until a report reaches the router

    def __init__(self, setup: Setup, rng: random.Random, *, policy: str = "") -> None:
        """Create a router.

        Args:
            setup: The replicas.
            rng: The source of random numbers.
            policy: A policy of a feature (Feature.policies); empty: what routers do.
        """
        self._names = [str(replica) for replica in range(setup.replicas)]
        self._now_s = 0.0
        self._queue = Queue[Request](lambda: self._fleet.loads.scale.busy_s)
        sides = (
            feature.replayed(policy if policy in feature.policies else "") for feature in FEATURES
        )
        self._features = features = PlacingFeatures(side for side in sides if side is not None)
        self._lines: Sequence[Line[Request, Any]] = features.lines
        # Index of a request that was not sent yet -> its context.
        self._contexts: dict[int, RequestContext] = {}
        self._has_published_queue = False  # whether the latest message listed waiting requests
        self._peer_publisher = PeerPublisher(
            queue=self._queue,
            features=features,
            scale=lambda: self._fleet.loads.scale.share(),
            clock=lambda: self._now_s,
        )
        self._fleet = Fleet(
            model="replay",
            revision="",
            block_size=setup.block_tokens,
            rng=rng,
            observer=self._peer_publisher,
            features=features,
            step_s=0.0,
        )
        self._peer_subscriber = PeerSubscriber(
            self._fleet,
            own=self._peer_publisher.router,
            clock=lambda: self._now_s,
            queue=self._queue,
        )
        self._attempts: dict[int, Attempt] = {}  # index of a request that runs -> its attempt
        facts = EngineFacts(
            block_size=setup.block_tokens,
            capacity_blocks=setup.capacity_blocks,
            max_model_len=setup.kv_tokens,
            prefill_tokens_per_s=setup.prefill.tokens_per_s,
            attention_tokens=setup.prefill.attention_tokens,
            step_tokens=setup.chunk_tokens,
            max_num_seqs=setup.max_sequences,
            host=setup.tiers.get(HOST),
            disk=setup.tiers.get(DISK),
        )
        load = Load()
        if setup.link:
            load = Load(features=carried(Exchanging("replay", "replay", *setup.link)))
        self._fleet.update(ReplicaRecord(name, "replay", 0, facts, load) for name in self._names)
        for name in self._names:
            self._fleet.mirror.join(name)

    def on_arrival(self, request: Request, now_s: float) -> None:
        """Let the request wait for a feature if it has to, and then in the queue."""
        placement = self._place(request, now_s)
        shortest_s = min([candidate.backlog_s for candidate in placement.ranking])
        is_busy = shortest_s >= self._queue.busy_backlog_s
        urgency = BATCH if request.is_batch else DEFAULT_URGENCY
        session = hash_number(request.session, bits=SESSION_BITS) if request.session else 0
        hints = SessionHints(session, is_end=request.is_end, has_tools=request.has_tools)
        context = RequestContext(now_s, urgency=urgency, hints=hints)
        self._contexts[request.index] = context = self._fleet.recognise(placement, context)
        for line in self._lines:
            line.observe(placement, is_busy=is_busy)
            if (waiter := line.ask(request, placement, context, now_s)) is not None:
                line.add(waiter)
                return
        self._queue_up(request, placement, now_s)

    def _queue_up(self, request: Request, placement: Placement, now_s: float) -> None:
        candidate = placement.ranking[0]
        self._queue.add(
            QueuedRequest(
                request,
                now_s,
                candidate.own_s + candidate.copy_s,
                is_batch=request.is_batch,
                holder_id=placement.holder_id,
                place=partial(self._fleet.place_batch, placement),
            )
        )

    def take_decisions(self, now_s: float) -> Iterator[PolicyDecision]:
        """Queue the requests that may go now; yield the requests that leave the queue."""
        for line in self._lines:
            while (waiter := line.due(now_s)) is not None:
                self._queue_up(waiter.request, self._place(waiter.request, now_s), waiter.arrived_s)
                # Dispatch before the line is asked again, which may count running requests.
                yield from self._queue_decisions(now_s)
        yield from self._queue_decisions(now_s)

    def _queue_decisions(self, now_s: float) -> Iterator[PolicyDecision]:
        while queued := self._pop_next(now_s):
            yield self._send(queued, now_s)

    def _pop_next(self, now_s: float) -> QueuedRequest[Request] | None:
        lanes = self._queue.batch > 0
        capacities = self._fleet.loads.capacities(self._names, now_s, lanes=lanes)
        return self._queue.pop_next(capacities, now_s)

    def wake_after_s(self) -> float | None:
        """Return the seconds until a replica may have capacity, or a waiting request may go."""
        waits_s = [line.recheck_s for line in self._lines if line]
        # Requests in other routers' queues may come first, so their messages matter, too.
        if self._queue.batch or (self._queue and self._peer_subscriber.alive):
            waits_s.append(self._queue.wake_s)
        elif self._queue:
            waits_s.append(
                self._fleet.loads.next_free_s(self._names, self._queue.busy_backlog_s, self._now_s)
            )
        return min(waits_s, default=None)

    def _place(self, request: Request, now_s: float, allowed_ids: Sequence[str] = ()) -> Placement:
        return self._fleet.place_chain(
            request.reusable, request.input_tokens, allowed_ids or self._names, now_s
        )

    def _send(self, queued: QueuedRequest[Request], now_s: float) -> PolicyDecision:
        request = queued.request
        self._queue.sent(queued, now_s)
        placement = self._place(request, now_s, queued.allowed_ids)
        best = self.best(placement)
        is_in_lane = queued.is_batch and not queued.is_promoted
        context = replace(self._contexts.pop(request.index), is_in_lane=is_in_lane)
        attempt = self._fleet.sent(placement, best.replica_id, str(request.index), now_s, context)
        self._attempts[request.index] = attempt
        sent = self._features.sending(GenerateRequest(attempt.request_id, NO_TOKENS), attempt)
        return PolicyDecision(
            request,
            int(best.replica_id),
            queued.order_s - now_s + (BATCH_S if queued.allowed_ids else 0.0),
            attempt.dispatch.new_tokens,
            sent.keep,
            is_batch=is_in_lane,
            pull=carried_in(sent.features, Pull),
        )

    def best(self, placement: Placement) -> Candidate:
        """Return the replica to which the request goes."""
        return placement.ranking[0]

    def on_pulled(self, request: Request, result: PullResult, now_s: float) -> None:
        chunk = Chunk((), 0, features=carried(result))
        for answering in self._features.answering:
            answering(self._attempts[request.index], chunk, now_s)

    def on_first_token(self, request: Request, now_s: float) -> None:
        self._attempts[request.index].first_token(now_s)

    def on_finish(self, request: Request, now_s: float) -> None:
        attempt = self._attempts.pop(request.index)
        attempt.last_chunk_s, attempt.is_complete = now_s, True
        attempt.load.record_answer(request.output_tokens)
        attempt.end()

    def on_index_change(
        self, replica: int, added: Sequence[Fingerprint], removed: Sequence[Fingerprint]
    ) -> None:
        self._fleet.mirror.remove(self._names[replica], removed)
        self._fleet.mirror.add(self._names[replica], added)

    def on_reports(self, reports: Sequence[LoadReport], now_s: float) -> None:
        for name, report in zip(self._names, reports, strict=True):
            self._fleet.loads.report(name, report.pending_tokens)

    def take_message(self, now_s: float) -> RouterMessage | None:
        self._now_s = now_s
        message = self._peer_publisher.next_message()
        had_queue, self._has_published_queue = (
            self._has_published_queue,
            bool(message.waiting and message.waiting.places),
        )
        is_needed = message.events or had_queue or self._has_published_queue
        return message if is_needed else None

    def receive(self, message: RouterMessage, now_s: float) -> None:
        self._now_s = now_s
        self._peer_subscriber.receive(message)


class MinTtft(Production):
    """The replica with the earliest first token: queued prefill plus the prompt's own prefill.

    This is Mooncake's rule as it is commonly described, without KV transfers between replicas. It
    is computed from four terms of kvroute's cost, which are explained in Candidate.
    """

    def best(self, placement: Placement) -> Candidate:
        return min(placement.ranking, key=lambda c: c.backlog_s + c.reload_s + c.own_s + c.copy_s)


POLICIES: Mapping[str, Callable[[Setup, random.Random], Policy]] = {
    "kvroute": Production,
    **{
        f"kvroute-{policy}": partial(Production, policy=policy)
        for feature in FEATURES
        for policy in feature.policies
    },
    **{name: partial(Baseline, name) for name in RANKINGS if name != "kvroute"},
    "consistent-hash": ConsistentHash,
    "sticky-least-loaded": StickyLeastLoaded,
    "sglang": SGLang,
    "dynamo": Dynamo,
    "dynamo-wspt": DynamoShortestFirst,
    "llm-d": LlmD,
    "llm-d-requests": LlmDRequests,
    "llm-d-blend": LlmDBlend,
    "llm-d-blend-spec": LlmDBlendSpeculative,
    "lmetric": LMetric,
    "min-ttft": MinTtft,
}
