"""A trace runs through modelled routers and replicas, event by event, in modelled time."""

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, pairwise

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.messages import Message
from kvroute.contract.records import HostTier
from kvroute.replay.hardware.model import HOST_GB_PER_S, KV_BYTES, EngineModel
from kvroute.replay.modelled_engine import Replica, StepResult, blocks_needed
from kvroute.replay.policies.production import POLICIES
from kvroute.replay.policies.protocol import Policy, Report, Setup
from kvroute.replay.workload.closed_loop import OPEN_LOOP, FollowUp
from kvroute.replay.workload.trace import Request, TraceError

ENGINE = EngineModel()


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster on which a trace is replayed."""

    replicas: int
    kv_tokens: int  # of each replica's cache
    routers: int = 1
    index_delay_s: float = 0.010  # from the end of a step until routers know its blocks
    share_delay_s: float = 0.005  # from a router's decision until others know it; inf: never
    engine: EngineModel = ENGINE
    slow_share: float = 0.0  # of the replicas; routers expect all to be as fast as `engine`
    slow_speed: float = 1.0  # of these, as a multiple of the others'
    host_tokens: int = 0  # of each replica's cache in host memory; 0: it has none
    host_gb_per_s: float = HOST_GB_PER_S  # of copies from there
    kv_bytes: int = KV_BYTES  # keys and values of a token

    def host(self, block_tokens: int) -> HostTier | None:
        """Of each replica, in blocks of so many tokens."""
        blocks = self.host_tokens // block_tokens
        bytes_per_s = 1e9 * self.host_gb_per_s
        return HostTier(blocks, block_tokens * self.kv_bytes, bytes_per_s) if blocks else None

    @property
    def speeds(self) -> list[float]:
        """Of each replica, as a multiple of `engine`. Slow ones are spread among the others."""
        counts = [int(n * self.slow_share + 1e-9) for n in range(self.replicas + 1)]
        return [self.slow_speed if n < then else 1.0 for n, then in pairwise(counts)]


@dataclass(slots=True)
class Outcome:
    """The results for each request, by its index, and for the replicas."""

    arrival_s: list[float]
    first_token_s: list[float]
    finished_s: list[float]
    hit_tokens: list[int]
    prefill_s: list[float]  # seconds that each replica spent on prompts
    host_tokens: list[int]  # hits that were copied from host memory
    reload_wait_s: list[float]  # for which each waited for these
    reload_s: list[float]  # seconds that each replica spent on these copies


@dataclass(frozen=True, slots=True)
class Arrival:
    request: Request


@dataclass(frozen=True, slots=True)
class StepEnd:
    replica: int
    at_s: float  # the event is void if the plan was shortened since


@dataclass(frozen=True, slots=True)
class ReloadEnd:
    replica: int


@dataclass(frozen=True, slots=True)
class IndexChange:
    replica: int
    added: Sequence[Fingerprint]
    removed: Sequence[Fingerprint]


@dataclass(frozen=True, slots=True)
class PeerMessage:
    router: int
    message: Message


@dataclass(frozen=True, slots=True)
class Wake:
    router: int


@dataclass(frozen=True, slots=True)
class Poll:
    """A router asks for the replicas' reports."""

    router: int


@dataclass(frozen=True, slots=True)
class Reports:
    router: int
    reports: Sequence[Report]  # of each replica


Event = Arrival | StepEnd | ReloadEnd | IndexChange | PeerMessage | Wake | Poll | Reports


def simulate(
    requests: Sequence[Request],
    cluster: Cluster,
    policy: str,
    *,
    seed: int = 0,
    follow_ups: Mapping[int, FollowUp] = OPEN_LOOP.follow_ups,
    queued: Sequence[int] = (),
    on_first_token: Callable[[], None] = lambda: None,
) -> Outcome:
    """Replays the requests until the last is answered. Equal arguments give equal outcomes.

    follow_ups: by the index of a request, the one that comes after its answer.
    queued: indices of requests. Whenever a request without a follow-up has its answer, the next of
    these arrives. The arrival times of requests that wait for others do not count.
    """
    _check_room(requests, cluster)
    return _Simulation(requests, cluster, policy, seed, follow_ups, queued, on_first_token).run()


class _Simulation:
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
            cluster.host(block_tokens),
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
            Replica(cluster.engine.at_speed(speed), setup.capacity_blocks, setup.host)
            for speed in cluster.speeds
        ]
        self._wakes_s: dict[int, float] = {}  # by router: when it is asked again
        self._order = count()  # of events at the same time
        later = {*queued, *(each.index for each in follow_ups.values())}
        self._events: list[tuple[float, int, Event]] = [
            (request.arrival_s, next(self._order), Arrival(request))
            for request in requests
            if request.index not in later
        ]
        heapify(self._events)
        self._unfinished = len(requests)
        self._begin_polls()
        none = [0.0] * len(requests)
        nothing = [0] * len(requests)
        self._outcome = Outcome(
            arrival_s=none,
            first_token_s=none.copy(),
            finished_s=none.copy(),
            hit_tokens=nothing,
            prefill_s=[],
            host_tokens=nothing.copy(),
            reload_wait_s=none.copy(),
            reload_s=[],
        )

    def run(self) -> Outcome:
        while self._events:
            now_s, _, event = heappop(self._events)
            match event:
                case Arrival(request):
                    self._arrive(request, now_s)
                case StepEnd(replica, at_s):
                    self._end_step(replica, at_s)
                case ReloadEnd(replica):
                    self._end_reload(replica, now_s)
                case IndexChange(replica, added, removed):
                    for router in self._routers:
                        router.index_changed(replica, added, removed)
                case PeerMessage(sender, message):
                    for number, router in enumerate(self._routers):
                        if number != sender:
                            router.receive(message, now_s)
                            self._ask(number, now_s)
                case Wake(number):
                    if self._wakes_s.get(number) == now_s:  # else an earlier one has replaced it
                        del self._wakes_s[number]
                        self._ask(number, now_s)
                case Poll(number):
                    self._poll(number, now_s)
                case Reports(number, reports):
                    self._routers[number].reported(reports, now_s)
                    self._ask(number, now_s)
        self._outcome.prefill_s = [replica.prefill_s for replica in self._replicas]
        self._outcome.reload_s = [
            replica.host.reload_s if replica.host is not None else 0.0 for replica in self._replicas
        ]
        return self._outcome

    def _arrive(self, request: Request, now_s: float) -> None:
        self._outcome.arrival_s[request.index] = now_s
        router = self._router_of(request)
        self._routers[router].arrived(request, now_s)
        self._ask(router, now_s)

    def _ask(self, router: int, now_s: float) -> None:
        """The router sends what it wants to send now."""
        policy = self._routers[router]
        for request, chosen, order_s, new_tokens, keep in policy.sends(now_s):
            before = self._replicas[chosen].plan
            self._replicas[chosen].arrive(request, now_s, order_s, new_tokens, keep)
            if self._replicas[chosen].plan is not before:
                self._await_step(chosen)
            self._await_reloads(chosen)
        self._share(router, now_s)
        after_s = policy.wakes_s()
        if after_s and now_s + after_s < self._wakes_s.get(router, math.inf):
            self._wakes_s[router] = now_s + after_s
            self._push(now_s + after_s, Wake(router))

    def _begin_polls(self) -> None:
        """A single router gets no reports: it knows all that is sent."""
        count = len(self._routers)
        for number, router in enumerate(self._routers):
            if count > 1 and router.report_s < math.inf:
                self._push(router.report_s * number / count, Poll(number))

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
        self._announce(replica, result, at_s)
        for request in result.first_tokens:
            self._note_first_token(request.index, self._replicas[replica], at_s)
            self._routers[self._router_of(request)].first_token(request, at_s)
            self._on_first_token()
        self._unfinished -= len(result.finished)
        for request in result.finished:
            self._outcome.finished_s[request.index] = at_s
            self._routers[self._router_of(request)].finished(request, at_s)
            if follow_up := self._follow_ups.get(request.index):
                arrival = Arrival(self._requests[follow_up.index])
                self._push(at_s + follow_up.think_s, arrival)
            elif self._queued:
                self._push(at_s, Arrival(self._requests[self._queued.popleft()]))
        if self._replicas[replica].plan:
            self._await_step(replica)
        self._await_reloads(replica)
        for router in {
            self._router_of(request) for request in (*result.first_tokens, *result.finished)
        }:
            self._ask(router, at_s)

    def _note_first_token(self, index: int, replica: Replica, at_s: float) -> None:
        outcome = self._outcome
        outcome.first_token_s[index] = at_s
        outcome.hit_tokens[index] = replica.hit_tokens.pop(index)
        outcome.host_tokens[index] = replica.host_tokens.pop(index, 0)
        outcome.reload_wait_s[index] = replica.reload_wait_s.pop(index, 0.0)

    def _end_reload(self, number: int, now_s: float) -> None:
        replica = self._replicas[number]
        before = replica.plan
        replica.end_reload(now_s)
        if replica.plan is not before:
            self._await_step(number)
        self._await_reloads(number)

    def _announce(self, replica: int, result: StepResult, at_s: float) -> None:
        if result.added or result.removed:
            change = IndexChange(replica, result.added, result.removed)
            self._push(at_s + self._cluster.index_delay_s, change)

    def _await_step(self, replica: int) -> None:
        plan = self._replicas[replica].plan
        assert plan is not None
        self._push(plan.ends_s, StepEnd(replica, plan.ends_s))

    def _await_reloads(self, number: int) -> None:
        host = self._replicas[number].host
        if host is not None and host.begun_s:
            for ends_s in host.begun_s:
                self._push(ends_s, ReloadEnd(number))
            host.begun_s.clear()

    def _push(self, at_s: float, event: Event) -> None:
        heappush(self._events, (at_s, next(self._order), event))

    def _router_of(self, request: Request) -> int:
        return request.index % len(self._routers)

    def _share(self, router: int, at_s: float) -> None:
        """Sends the router's latest events to the other routers."""
        message = self._routers[router].take_message(at_s)
        there_s = at_s + self._cluster.share_delay_s
        if message is not None and len(self._routers) > 1 and there_s < math.inf:
            self._push(there_s, PeerMessage(router, message))


def _check_room(requests: Sequence[Request], cluster: Cluster) -> None:
    most = max(blocks_needed(request) * request.block_tokens for request in requests)
    if most > cluster.kv_tokens:
        raise TraceError(
            f"a request of the trace needs room for {most} tokens, more than the "
            f"{cluster.kv_tokens} of a replica; give --kv-tokens {most} at least"
        )
