"""A discrete-event simulation of routers and replicas that serve a trace."""

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count, pairwise

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import DISK, HOST, Tier
from kvroute.contract.records import TierFacts
from kvroute.features.engine_sides import engine_features
from kvroute.replay.hardware.engine_model import (
    DISK_GB_PER_S,
    HOST_GB_PER_S,
    KV_BYTES,
    LINK_LATENCY_S,
    EngineModel,
)
from kvroute.replay.modelled_engine import ModelledReplica
from kvroute.replay.network import Network
from kvroute.replay.policies.policy_protocol import Policy, PolicyDecision, Setup
from kvroute.replay.policies.production import POLICIES
from kvroute.replay.simulation_events import (
    Arrival,
    Event,
    IndexChange,
    PeerMessage,
    Poll,
    PullChange,
    ReloadEnd,
    Reports,
    RouterWake,
    StepEnd,
)
from kvroute.replay.steps import StepResult, blocks_needed
from kvroute.replay.token_gaps import TokenGaps
from kvroute.replay.workload.closed_loop import OPEN_LOOP, FollowUp
from kvroute.replay.workload.trace import Request, TraceError
from kvroute.replica.fabric.pull import LinkSpeed, PullResult, Reason

ENGINE = EngineModel()


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster on which a trace is replayed."""

    replicas: int
    kv_tokens: int  # tokens in each replica's cache
    routers: int = 1
    index_delay_s: float = 0.010  # time from the end of a step until routers know the new blocks
    share_delay_s: float = 0.005  # time until other routers know a router's decision; inf: never
    engine: EngineModel = ENGINE
    slow_share: float = 0.0  # share of slow replicas; routers expect all to be as fast as `engine`
    slow_speed: float = 1.0  # speed of slow replicas, relative to the other replicas
    host_tokens: int = 0  # size of each replica's cache in host memory, in tokens; 0: none
    host_gb_per_s: float = HOST_GB_PER_S  # speed of copies from host memory
    disk_tokens: int = 0  # size of each replica's disk cache, in tokens; 0: none
    disk_gb_per_s: float = DISK_GB_PER_S  # speed of reads of a disk cache
    kv_bytes: int = KV_BYTES  # bytes of a token's keys and values
    link_gb_per_s: float = 0.0  # bandwidth of each replica's link for pulls; 0: no pulls
    link_latency_s: float = LINK_LATENCY_S  # time until the first bytes of a pull
    # What features tell the engines (Feature.engine).
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def link(self) -> LinkSpeed | None:
        """Return the links for pulls; None: replicas do not pull."""
        if not self.host_tokens or not self.link_gb_per_s:
            return None
        return LinkSpeed(self.link_latency_s, 1e9 * self.link_gb_per_s)

    def tiers(self, block_tokens: int) -> Mapping[Tier, TierFacts]:
        """Return the slower tiers of each replica, the fastest first.

        As in production, replicas without host memory have no disk cache.
        """
        sizes = {
            HOST: (self.host_tokens, self.host_gb_per_s),
            DISK: (self.disk_tokens, self.disk_gb_per_s),
        }
        if self.host_tokens < block_tokens:
            return {}
        return {
            tier: TierFacts(tokens // block_tokens, block_tokens * self.kv_bytes, 1e9 * gb_per_s)
            for tier, (tokens, gb_per_s) in sizes.items()
            if tokens >= block_tokens
        }

    @property
    def speeds(self) -> list[float]:
        """Return the speed of each replica relative to `engine`; spread slow replicas evenly."""
        # counts[n]: how many of the first n replicas are slow. Replica n is slow if counts[n + 1]
        # is higher.
        counts = [int(n * self.slow_share + 1e-9) for n in range(self.replicas + 1)]
        return [self.slow_speed if n < after else 1.0 for n, after in pairwise(counts)]


@dataclass(slots=True)
class Outcome:
    """The results: a value for each request, by its index, or for each replica."""

    arrival_s: list[float]
    first_token_s: list[float]
    finished_s: list[float]
    hit_tokens: list[int]
    prefill_s: list[float]  # seconds that each replica spent on prompts
    reloaded_tokens: list[int]  # hit tokens that were copied from a slower tier
    disk_tokens: list[int]  # hit tokens from the disk cache, which reloaded_tokens includes
    reload_wait_s: list[float]  # seconds that each request waited for a copy
    reload_s: list[float]  # seconds that each replica spent on copies
    pulled_tokens: list[int]  # tokens that were pulled from another replica
    gaps: TokenGaps = field(default_factory=TokenGaps)  # times between two tokens of the answers
    preemptions: int = 0  # how often requests were preempted for lack of blocks


def simulate(
    requests: Sequence[Request],
    cluster: Cluster,
    policy: str,
    *,
    seed: int = 0,
    follow_ups: Mapping[int, FollowUp] = OPEN_LOOP.follow_ups,
    queued: Sequence[int] = (),
    on_first_token: Callable[[], None] = lambda: None,
    until_s: float = math.inf,
) -> Outcome:
    """Replay the requests until all are answered. Equal arguments give equal outcomes.

    Args:
        requests: The requests. If a request is in `queued` or is a follow-up, its arrival time is
            ignored.
        cluster: The modelled cluster.
        policy: Name of the routing policy.
        seed: Seed of all random numbers.
        follow_ups: Index of a request -> the request that arrives after its answer.
        queued: Indices of requests. When a request without a follow-up is answered, the next one of
            these arrives, if both are batch requests or neither is.
        on_first_token: Called at each request's first token.
        until_s: The replay ends at this time; the times of later events are then 0 in the outcome.
    """
    _check_capacity(requests, cluster)
    simulation = _Simulation(requests, cluster, policy, seed, follow_ups, queued, on_first_token)
    return simulation.run(until_s)


class _Simulation:
    """The state of a simulation: routers, replicas, and a heap of future events."""

    def __init__(
        self,
        requests: Sequence[Request],
        cluster: Cluster,
        policy: str,
        seed: int,
        follow_ups: Mapping[int, FollowUp],
        queued: Sequence[int],
        on_first_token: Callable[[], None],
    ) -> None:
        block_tokens = requests[0].block_tokens
        setup = Setup(
            cluster.replicas,
            cluster.kv_tokens,
            cluster.engine.prefill,
            block_tokens,
            cluster.engine.chunk_tokens,
            cluster.engine.max_sequences,
            cluster.tiers(block_tokens),
            cluster.link,
        )
        self._cluster = cluster
        self._requests = requests
        self._follow_ups = follow_ups
        self._queued = deque(queued)
        self._on_first_token = on_first_token
        self._routers: list[Policy] = [
            POLICIES[policy](setup, random.Random(f"{seed}/{i}")) for i in range(cluster.routers)
        ]
        self._replicas = [
            ModelledReplica(
                cluster.engine.at_speed(speed),
                setup.capacity_blocks,
                setup.tiers,
                block_tokens=block_tokens,
                features=engine_features(cluster.environment),
            )
            for speed in cluster.speeds
        ]
        self._network = Network(cluster.link or LinkSpeed(0.0, math.inf))
        self._pulled: dict[int, PullResult] = {}  # request index -> what its pull has done
        self._wakes_s: dict[int, float] = {}  # router -> time of its next wake-up
        self._order = count()  # numbers the events; at equal times, the lower number is first
        dependent = {*queued, *(follow_up.index for follow_up in follow_ups.values())}
        self._events: list[tuple[float, int, Event]] = [
            (request.arrival_s, next(self._order), Arrival(request))
            for request in requests
            if request.index not in dependent
        ]
        heapify(self._events)
        self._unfinished = len(requests)
        self._begin_polls()
        zeros = [0.0] * len(requests)
        zero_counts = [0] * len(requests)
        self._outcome = Outcome(
            arrival_s=zeros,
            first_token_s=zeros.copy(),
            finished_s=zeros.copy(),
            hit_tokens=zero_counts,
            prefill_s=[],
            reloaded_tokens=zero_counts.copy(),
            disk_tokens=zero_counts.copy(),
            reload_wait_s=zeros.copy(),
            reload_s=[],
            pulled_tokens=zero_counts.copy(),
        )

    def run(self, until_s: float) -> Outcome:
        while self._events:
            now_s, _, event = heappop(self._events)
            if now_s > until_s:
                break
            match event:
                case Arrival(request):
                    self._arrive(request, now_s)
                case StepEnd(replica, at_s):
                    self._end_step(replica, at_s)
                case ReloadEnd(replica):
                    self._end_reload(replica, now_s)
                case PullChange(at_s):
                    self._change_pulls(at_s)
                case IndexChange(replica, added, removed):
                    for router in self._routers:
                        router.on_index_change(replica, added, removed)
                case PeerMessage(sender, message):
                    for number, router in enumerate(self._routers):
                        if number != sender:
                            router.receive(message, now_s)
                            self._send(number, now_s)
                case RouterWake(number):
                    # The event is ignored if an earlier wake-up has replaced it.
                    if self._wakes_s.get(number) == now_s:
                        del self._wakes_s[number]
                        self._send(number, now_s)
                case Poll(number):
                    self._poll(number, now_s)
                case Reports(number, reports):
                    self._routers[number].on_reports(reports, now_s)
                    self._send(number, now_s)
        self._outcome.prefill_s = [replica.prefill_s for replica in self._replicas]
        for engine in self._replicas:
            self._outcome.gaps.update(engine.gaps)
            self._outcome.preemptions += engine.preemptions
        self._outcome.reload_s = [
            0.0 if replica.memory is None else replica.memory.reload_s for replica in self._replicas
        ]
        return self._outcome

    def _arrive(self, request: Request, now_s: float) -> None:
        self._outcome.arrival_s[request.index] = now_s
        router = self._router_of(request)
        self._routers[router].on_arrival(request, now_s)
        self._send(router, now_s)

    def _send(self, router: int, now_s: float) -> None:
        """Deliver the requests that a router dispatches now, and its message to other routers."""
        policy = self._routers[router]
        for decision in policy.take_decisions(now_s):
            request, chosen, order_s, new_tokens, keep, is_batch, _ = decision
            pulled = self._begin_pull(decision, now_s)
            old_plan = self._replicas[chosen].plan
            self._replicas[chosen].arrive(
                request, now_s, order_s, new_tokens, keep, is_batch, pulled
            )
            if self._replicas[chosen].plan is not old_plan:
                self._await_step(chosen)
            self._await_reloads(chosen)
        self._share(router, now_s)
        after_s = policy.wake_after_s()
        if after_s and now_s + after_s < self._wakes_s.get(router, math.inf):
            self._wakes_s[router] = now_s + after_s
            self._push(now_s + after_s, RouterWake(router))

    def _begin_pull(self, decision: PolicyDecision, now_s: float) -> Sequence[Fingerprint]:
        """Begin the pull of a decision, if there is any, and return the blocks to pull."""
        request, order = decision.request, decision.pull
        if order is None:
            return ()
        target, source = self._replicas[decision.replica], self._replicas[int(order.replica_id)]
        blocks = order.tokens // request.block_tokens
        first = target.held_blocks(request)
        assert source.memory is not None
        end = min(blocks, first + source.memory.hits_in_host(request, first))
        if end <= first:
            reason: Reason = "" if blocks <= first else "gone"
            self._pulled[request.index] = PullResult(0, 0, 0.0, reason)
            return ()
        self._network.begin(
            request,
            order,
            decision.replica,
            first_block=first,
            blocks=end - first,
            block_bytes=source.memory.block_bytes,
            now_s=now_s,
        )
        self._await_pulls()
        return request.blocks[first:end]

    def _change_pulls(self, at_s: float) -> None:
        if self._network.next_s != at_s:
            return
        for transfer in self._network.end(at_s):
            request, number = transfer.request, transfer.target
            memory, replica = self._replicas[transfer.source].memory, self._replicas[number]
            assert memory is not None
            blocks = min(transfer.arrived, memory.hits_in_host(request, transfer.first_block))
            tokens = blocks * request.block_tokens
            is_late = transfer.arrived < transfer.blocks
            reason: Reason = "late" if is_late else "" if blocks == transfer.blocks else "gone"
            self._pulled[request.index] = transfer.result(tokens, at_s, reason)
            self._outcome.pulled_tokens[request.index] = tokens
            old_plan = replica.plan
            replica.end_pull(request, transfer.first_block + blocks, at_s)
            if replica.plan is not old_plan:
                self._await_step(number)
            self._await_reloads(number)
        self._await_pulls()

    def _await_pulls(self) -> None:
        next_s = self._network.next_s
        if next_s < math.inf:
            self._push(next_s, PullChange(next_s))

    def _begin_polls(self) -> None:
        """Schedule the first reports. A single router gets none, since it knows all requests."""
        routers = len(self._routers)
        for number, router in enumerate(self._routers):
            if routers > 1 and router.report_s < math.inf:
                self._push(router.report_s * number / routers, Poll(number))

    def _poll(self, number: int, now_s: float) -> None:
        router = self._routers[number]
        reports = [replica.report() for replica in self._replicas]
        self._push(now_s + router.report_age_s, Reports(number, reports))
        if self._unfinished:
            self._push(now_s + router.report_s, Poll(number))

    def _end_step(self, replica: int, at_s: float) -> None:
        plan = self._replicas[replica].plan
        if plan is None or plan.ends_s != at_s:
            return
        result = self._replicas[replica].end_step()
        self._publish(replica, result, at_s)
        for request in result.first_tokens:
            self._record_first_token(request.index, self._replicas[replica], at_s)
            if pulled := self._pulled.pop(request.index, None):
                self._routers[self._router_of(request)].on_pulled(request, pulled, at_s)
            self._routers[self._router_of(request)].on_first_token(request, at_s)
            self._on_first_token()
        self._unfinished -= len(result.finished)
        for request in result.finished:
            answered_s = at_s + self._cluster.engine.overhead_s
            self._outcome.finished_s[request.index] = answered_s
            self._routers[self._router_of(request)].on_finish(request, at_s)
            if follow_up := self._follow_ups.get(request.index):
                arrival = Arrival(self._requests[follow_up.index])
                self._push(answered_s + follow_up.think_s, arrival)
            elif self._queued and self._requests[self._queued[0]].is_batch == request.is_batch:
                self._push(answered_s, Arrival(self._requests[self._queued.popleft()]))
        if self._replicas[replica].plan:
            self._await_step(replica)
        self._await_reloads(replica)
        for router in {
            self._router_of(request) for request in (*result.first_tokens, *result.finished)
        }:
            self._send(router, at_s)

    def _record_first_token(self, index: int, replica: ModelledReplica, at_s: float) -> None:
        outcome = self._outcome
        outcome.first_token_s[index] = at_s + self._cluster.engine.overhead_s
        outcome.hit_tokens[index] = replica.hit_tokens.pop(index)
        reloaded = replica.reloaded_tokens.pop(index, {})
        outcome.reloaded_tokens[index] = sum(reloaded.values())
        outcome.disk_tokens[index] = reloaded.get(DISK, 0)
        outcome.reload_wait_s[index] = replica.reload_wait_s.pop(index, 0.0)

    def _end_reload(self, number: int, now_s: float) -> None:
        replica = self._replicas[number]
        old_plan = replica.plan
        replica.end_reload(now_s)
        if replica.plan is not old_plan:
            self._await_step(number)
        self._await_reloads(number)

    def _publish(self, replica: int, result: StepResult, at_s: float) -> None:
        if result.added or result.removed:
            change = IndexChange(replica, result.added, result.removed)
            self._push(at_s + self._cluster.index_delay_s, change)

    def _await_step(self, replica: int) -> None:
        plan = self._replicas[replica].plan
        assert plan is not None
        self._push(plan.ends_s, StepEnd(replica, plan.ends_s))

    def _await_reloads(self, number: int) -> None:
        memory = self._replicas[number].memory
        if memory is not None and memory.new_ends_s:
            for ends_s in memory.new_ends_s:
                self._push(ends_s, ReloadEnd(number))
            memory.new_ends_s.clear()

    def _push(self, at_s: float, event: Event) -> None:
        heappush(self._events, (at_s, next(self._order), event))

    def _router_of(self, request: Request) -> int:
        return request.index % len(self._routers)

    def _share(self, router: int, at_s: float) -> None:
        """Send the router's new events to the other routers."""
        message = self._routers[router].take_message(at_s)
        received_s = at_s + self._cluster.share_delay_s
        if message is not None and len(self._routers) > 1 and received_s < math.inf:
            self._push(received_s, PeerMessage(router, message))


def _check_capacity(requests: Sequence[Request], cluster: Cluster) -> None:
    largest = max(blocks_needed(request) * request.block_tokens for request in requests)
    if largest > cluster.kv_tokens:
        raise TraceError(
            f"a request of the trace needs a KV cache of {largest} tokens, but a replica has "
            f"{cluster.kv_tokens}; set --kv-tokens to {largest} or more"
        )
