"""Routing policies for a replay: kvroute's production code, and others written from their sources.

Every policy knows what a router knows: the index, after its delay, and its own requests.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import SESSION_BITS, Keep, number_of
from kvroute.contract.messages import Message
from kvroute.contract.records import EngineFacts, Load, ReplicaRecord
from kvroute.replay.policies.dynamo import Dynamo, DynamoShortestFirst
from kvroute.replay.policies.protocol import Policy, Report, Sending, Setup
from kvroute.replay.policies.rivals import (
    Baseline,
    ConsistentHash,
    LlmD,
    LlmDSpeculative,
    LMetric,
    SGLang,
)
from kvroute.replay.workload.trace import Request
from kvroute.router.admission.queue import Held, Queue
from kvroute.router.admission.seats import IDLE_S, Seats, Waiter
from kvroute.router.placement.attempts import Attempt, Placement, RequestContext
from kvroute.router.placement.baselines import RANKINGS
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.peers import PeerPublisher, PeerSubscriber
from kvroute.router.placement.policy import Candidate
from kvroute.router.sessions.returns import Retention, Said

RETRY_SHARE = 1 / 60  # of IDLE_S, between two looks at idle sessions while others wait


class Production:
    """kvroute: a Router's Fleet, loads, branches, ranking and messages, on the trace's clock."""

    report_s = 0.25  # as replicas do (TELL_INTERVAL_S in replica/deployment.py)
    report_age_s = 0.002

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self._names = [str(replica) for replica in range(setup.replicas)]
        self._now_s = 0.0
        self._queue = Queue[Request](lambda: self._fleet.scale.busy_s)
        self._seats = Seats[Request](lambda: self._fleet.cache_tokens)
        self._retentions: dict[int, Retention] = {}  # of requests that have come and were not sent
        self._has_told = False  # other routers that something waits
        self._peer_publisher = PeerPublisher(
            queue=self._queue,
            seats=self._seats,
            scale=lambda: self._fleet.scale.share(),
            clock=lambda: self._now_s,
        )
        self._fleet = Fleet(
            model="replay",
            revision="",
            block_size=setup.block_tokens,
            rng=rng,
            observer=self._peer_publisher,
            seats=self._seats,
            step_s=0.0,
        )
        self._peer_subscriber = PeerSubscriber(
            self._fleet,
            own=self._peer_publisher.router,
            clock=lambda: self._now_s,
            queue=self._queue,
        )
        self._attempts: dict[int, Attempt] = {}
        facts = EngineFacts(
            block_size=setup.block_tokens,
            capacity_blocks=setup.capacity_blocks,
            max_model_len=setup.kv_tokens,
            prefill_tokens_per_s=setup.prefill.tokens_per_s,
            attention_tokens=setup.prefill.attention_tokens,
            step_tokens=setup.chunk_tokens,
            host=setup.host,
        )
        self._fleet.update(ReplicaRecord(name, "replay", 0, facts, Load()) for name in self._names)
        for name in self._names:
            self._fleet.mirror.join(name)

    def arrived(self, request: Request, now_s: float) -> None:
        """Let the request wait for a seat if its session needs one, then for its turn."""
        placement = self._place(request, now_s)
        retention = self._fleet.retention(placement, self._said(request))
        self._retentions[request.index] = retention
        least_s = min([candidate.backlog_s for candidate in placement.ranking])
        is_busy = least_s >= self._queue.hold_s
        self._seats.observe(is_busy=is_busy, pressure=self._fleet.pressure)
        waiter = Waiter(request, retention.turn, request.input_tokens, 0, now_s)
        if self._seats.is_free(waiter, now_s):
            self._queue_up(request, placement, now_s)
        else:
            self._seats.add(waiter)

    def _said(self, request: Request) -> Said:
        session = number_of(request.session, bits=SESSION_BITS) if request.session else 0
        return Said(session, is_end=request.is_end, has_tools=request.has_tools)

    def _queue_up(self, request: Request, placement: Placement, now_s: float) -> None:
        there = placement.ranking[0]
        self._queue.add(Held(request, now_s, there.own_s + there.copy_s, home=placement.home))

    def sends(self, now_s: float) -> Iterator[Sending]:
        """Send the requests whose turn it is, after those that have a seat now were queued."""
        while waiter := self._seats.due(now_s):
            self._queue_up(waiter.request, self._place(waiter.request, now_s), waiter.arrived_s)
            yield from self._sends(now_s)  # takes the seat before another session gets it
        yield from self._sends(now_s)

    def _sends(self, now_s: float) -> Iterator[Sending]:
        while held := self._queue.due(self._fleet.rooms(self._names, now_s), now_s):
            yield self._send(held, now_s)

    def wakes_s(self) -> float | None:
        """Return the time until a replica has room for what waits, or until seats are idle."""
        waits_s = [RETRY_SHARE * IDLE_S] if self._seats else []
        if self._queue and self._peer_subscriber.alive:  # whose requests may come first
            waits_s.append(self._queue.wake_s)
        elif self._queue:
            waits_s.append(self._fleet.room_in_s(self._names, self._queue.hold_s, self._now_s))
        return min(waits_s, default=None)

    def _place(self, request: Request, now_s: float, among: Sequence[str] = ()) -> Placement:
        return self._fleet.place_chain(
            request.reusable, request.input_tokens, among or self._names, now_s
        )

    def _send(self, held: Held[Request], now_s: float) -> Sending:
        request = held.request
        self._queue.sent(held, now_s)
        placement = self._place(request, now_s, held.among)
        best = self.best(placement)
        retention = self._retentions.pop(request.index)
        context = RequestContext(now_s, retention=retention)
        attempt = self._fleet.sent(placement, best.replica_id, str(request.index), now_s, context)
        self._attempts[request.index] = attempt
        return Sending(
            request,
            int(best.replica_id),
            held.turn_s - now_s,
            attempt.dispatch.new_tokens,
            self.kept(retention.keep),
        )

    def best(self, placement: Placement) -> Candidate:
        return placement.ranking[0]

    def kept(self, keep: Keep) -> Keep | None:
        """Return how a replica keeps a request's blocks when the answer has ended."""
        return keep

    def first_token(self, request: Request, now_s: float) -> None:
        self._attempts[request.index].first_token(now_s)

    def finished(self, request: Request, now_s: float) -> None:
        attempt = self._attempts.pop(request.index)
        attempt.last_chunk_s, attempt.is_complete = now_s, True
        attempt.end()

    def index_changed(
        self, replica: int, added: Sequence[Fingerprint], removed: Sequence[Fingerprint]
    ) -> None:
        self._fleet.mirror.remove(self._names[replica], removed)
        self._fleet.mirror.add(self._names[replica], added)

    def reported(self, reports: Sequence[Report], now_s: float) -> None:
        for name, report in zip(self._names, reports, strict=True):
            self._fleet.told(name, report.pending_tokens)

    def take_message(self, now_s: float) -> Message | None:
        self._now_s = now_s
        message = self._peer_publisher.take()
        has_told, self._has_told = self._has_told, bool(message.waiting and message.waiting.places)
        return message if message.events or has_told or self._has_told else None

    def receive(self, message: Message, now_s: float) -> None:
        self._now_s = now_s
        self._peer_subscriber.receive(message)


class LeastRecentlyUsed(Production):
    """kvroute, but engines evict what was not used for the longest time."""

    def kept(self, keep: Keep) -> Keep | None:
        return None


class MinTtft(Production):
    """The earliest first token for this request: queued prefill plus its own, with its hit.

    Mooncake's rule as it is commonly described, without KV transfers between replicas; kvroute's
    cost with only the terms W, reload, own and copy.
    """

    def best(self, placement: Placement) -> Candidate:
        return min(placement.ranking, key=lambda c: c.backlog_s + c.reload_s + c.own_s + c.copy_s)


POLICIES: Mapping[str, Callable[[Setup, random.Random], Policy]] = {
    "kvroute": Production,
    "kvroute-lru": LeastRecentlyUsed,
    **{name: partial(Baseline, name) for name in RANKINGS if name != "kvroute"},
    "consistent-hash": ConsistentHash,
    "sglang": SGLang,
    "dynamo": Dynamo,
    "dynamo-wspt": DynamoShortestFirst,
    "llm-d": LlmD,
    "llm-d-spec": LlmDSpeculative,
    "lmetric": LMetric,
    "min-ttft": MinTtft,
}
