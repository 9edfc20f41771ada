"""Routing policies for a replay: kvroute's production code, and others written from their sources.

Every policy knows what a router knows: the index, after its delay, and its own requests.
"""

import random
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import NamedTuple, Protocol

from kvroute.contract.fingerprint import Fingerprint
from kvroute.contract.messages import Message
from kvroute.contract.records import EngineFacts, Load, ReplicaRecord
from kvroute.contract.speed import PrefillModel
from kvroute.replay.trace import Request
from kvroute.router.routing.attempts import Attempt, Placement
from kvroute.router.routing.baselines import RANKINGS
from kvroute.router.routing.fleet import Fleet
from kvroute.router.routing.mirror import Mirror
from kvroute.router.routing.peers import PeerPublisher, PeerSubscriber
from kvroute.router.routing.policy import Candidate
from kvroute.router.routing.queue import WAKE_S, Held, Queue


@dataclass(frozen=True, slots=True)
class Setup:
    """A router's initial facts about its replicas."""

    replicas: int
    kv_tokens: int
    prefill: PrefillModel
    block_tokens: int

    @property
    def capacity_blocks(self) -> int:
        return self.kv_tokens // self.block_tokens


class Sending(NamedTuple):
    """A request that goes to a replica. order_s: its turn there, after its arrival."""

    request: Request
    replica: int
    order_s: float = 0.0


class Policy(Protocol):
    """One router's decisions, and the events from which it learns."""

    def arrived(self, request: Request, now_s: float) -> None:
        """A client's request. It waits in the router until `sends` has it."""

    def sends(self, now_s: float) -> Iterable[Sending]:
        """The requests that go to replicas now, in this order."""

    def wakes_s(self) -> float | None:
        """When it wants to be asked again, should nothing happen before. None: never."""

    def first_token(self, request: Request, now_s: float) -> None: ...

    def finished(self, request: Request) -> None: ...

    def index_changed(
        self, replica: int, added: Sequence[Fingerprint], removed: Sequence[Fingerprint]
    ) -> None: ...

    def take_message(self, now_s: float) -> Message | None:
        """Its events for the other routers since the last call."""

    def receive(self, message: Message, now_s: float) -> None:
        """A message of another router, after its delay."""


class Production:
    """kvroute: a Router's Fleet, loads, branches, ranking and messages, on the trace's clock."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self._names = [str(replica) for replica in range(setup.replicas)]
        self._now_s = 0.0
        self._queue = Queue[Request]()
        self._peer_publisher = PeerPublisher(queue=self._queue, clock=lambda: self._now_s)
        self._fleet = Fleet(
            model="replay",
            revision="",
            block_size=setup.block_tokens,
            rng=rng,
            observer=self._peer_publisher,
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
        )
        self._fleet.update(ReplicaRecord(name, "replay", 0, facts, Load()) for name in self._names)
        for name in self._names:
            self._fleet.mirror.join(name)

    def arrived(self, request: Request, now_s: float) -> None:
        placement = self._place(request, now_s)
        there = placement.ranking[0]
        held = Held(request, now_s, there.own_s + there.copy_s, home=placement.home)
        self._queue.add(held)

    def sends(self, now_s: float) -> Iterator[Sending]:
        while held := self._queue.due(self._fleet.rooms(self._names, now_s), now_s):
            yield self._send(held, now_s)

    def wakes_s(self) -> float | None:
        return WAKE_S if self._queue else None

    def _place(self, request: Request, now_s: float, among: Sequence[str] = ()) -> Placement:
        return self._fleet.place_chain(
            request.reusable, request.input_tokens, among or self._names, now_s
        )

    def _send(self, held: Held[Request], now_s: float) -> Sending:
        request = held.request
        self._queue.sent(held, now_s)
        placement = self._place(request, now_s, held.among)
        best = self.best(placement)
        attempt = self._fleet.sent(placement, best.replica_id, str(request.index), now_s)
        self._attempts[request.index] = attempt
        return Sending(request, int(best.replica_id), held.turn_s - now_s)

    def best(self, placement: Placement) -> Candidate:
        return placement.ranking[0]

    def first_token(self, request: Request, now_s: float) -> None:
        self._attempts[request.index].first_token(now_s)

    def finished(self, request: Request) -> None:
        self._attempts.pop(request.index).end()

    def index_changed(
        self, replica: int, added: Sequence[Fingerprint], removed: Sequence[Fingerprint]
    ) -> None:
        self._fleet.mirror.remove(self._names[replica], removed)
        self._fleet.mirror.add(self._names[replica], added)

    def take_message(self, now_s: float) -> Message | None:
        self._now_s = now_s
        message = self._peer_publisher.take()
        return message if message.events or message.waiting else None

    def receive(self, message: Message, now_s: float) -> None:
        self._now_s = now_s
        self._peer_subscriber.receive(message)


class MinTtft(Production):
    """The earliest first token for this request: queued prefill plus its own, with its hit.

    Mooncake's rule as it is commonly described, without KV transfers between replicas; kvroute's
    cost with only the terms W, own and copy.
    """

    def best(self, placement: Placement) -> Candidate:
        return min(placement.ranking, key=lambda c: c.backlog_s + c.own_s + c.copy_s)


class Counting:
    """A policy that counts its own requests and nothing else."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.replicas = range(setup.replicas)
        self.setup = setup
        self.rng = rng
        self.active = [0] * setup.replicas  # requests not answered yet
        self.queued = [0] * setup.replicas  # requests without a first token
        self.at: dict[int, int] = {}  # request -> replica
        self._arrived: list[Request] = []

    def pick(self, request: Request) -> int:
        """The replica for this request."""
        raise NotImplementedError

    def arrived(self, request: Request, now_s: float) -> None:
        self._arrived.append(request)

    def sends(self, now_s: float) -> Sequence[Sending]:
        arrived, self._arrived = self._arrived, []
        return [Sending(request, self.choose(request)) for request in arrived]

    def wakes_s(self) -> float | None:
        return None

    def choose(self, request: Request) -> int:
        replica = self.pick(request)
        self.at[request.index] = replica
        self.active[replica] += 1
        self.queued[replica] += 1
        self.sent(request, replica)
        return replica

    def sent(self, request: Request, replica: int) -> None: ...

    def first_token(self, request: Request, now_s: float) -> None:
        self.queued[self.at[request.index]] -= 1

    def finished(self, request: Request) -> None:
        self.active[self.at.pop(request.index)] -= 1

    def index_changed(
        self, replica: int, added: Sequence[Fingerprint], removed: Sequence[Fingerprint]
    ) -> None: ...

    def take_message(self, now_s: float) -> Message | None:
        return None

    def receive(self, message: Message, now_s: float) -> None: ...

    def least(self, cost: Sequence[float], among: Sequence[int] | None = None) -> int:
        """The replica with the least cost; ties are broken at random."""
        return min(among or self.replicas, key=lambda replica: (cost[replica], self.rng.random()))


class Baseline(Counting):
    """A baseline policy that `--policy` also offers for a live router."""

    def __init__(self, name: str, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self._rank = RANKINGS[name]()

    def pick(self, request: Request) -> int:
        candidates = [
            Candidate(f"{replica:05}", 0, 0.0, 0.0, unanswered=active)
            for replica, active in enumerate(self.active)
        ]
        return int(self._rank(candidates, forks=0.0, rng=self.rng)[0].replica_id)


class ConsistentHash(Counting):
    """A ring with 100 points per replica.

    A trace has no sessions, so the first two blocks are the key: all prompts may share one block.
    """

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        points = random.Random(0)  # every router has the same ring
        self.ring = sorted(
            (points.random(), replica) for replica in self.replicas for _ in [0] * 100
        )

    def pick(self, request: Request) -> int:
        key = random.Random(str(request.blocks[:2])).random()
        return self.ring[bisect(self.ring, (key,)) % len(self.ring)][1]


class RayPrefix(Counting):
    """Ray Serve's PrefixCacheAffinityRouter, with its defaults: no load threshold, match >= 10%.

    From ray 2.60, ray/llm/_internal/serve/routing_policies/prefix_aware. It remembers where it sent
    each block. It picks the shortest queue among the longest matches; without a match, among the
    replicas that received least text.
    """

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.tree: dict[Fingerprint, int] = {}  # block -> bits of the replicas it was sent to
        self.sizes = [0] * setup.replicas

    def pick(self, request: Request) -> int:
        known = list(takewhile(self.tree.__contains__, request.blocks))
        if len(known) * request.block_tokens >= 0.1 * request.input_tokens and known:
            holders = [r for r in self.replicas if self.tree[known[-1]] >> r & 1]
            return self.least(self.active, holders)
        smallest = min(self.sizes)
        return self.least(self.active, [r for r in self.replicas if self.sizes[r] == smallest])

    def sent(self, request: Request, replica: int) -> None:
        for block in request.blocks:
            bits = self.tree.get(block, 0)
            self.sizes[replica] += not bits >> replica & 1
            self.tree[block] = bits | 1 << replica


class SGLang(Counting):
    """SGLang's cache_aware: least load if out of balance, else the longest match above 30%.

    From sgl-project/sglang, sgl-model-gateway/src/policies/cache_aware.rs; thresholds are the
    defaults of RouterArgs. It remembers where it sent each block, without eviction: its tree has
    room for more than a trace.
    """

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.tree: dict[Fingerprint, int] = {}  # block -> the replica it was last sent to

    def pick(self, request: Request) -> int:
        most, fewest = max(self.active), min(self.active)
        if most - fewest > 64 and most > 1.5 * fewest:
            return self.least(self.active)
        known = list(takewhile(self.tree.__contains__, request.blocks))
        if len(known) * request.block_tokens > 0.3 * request.input_tokens:
            return self.tree[known[-1]]
        return self.least(self.active)

    def sent(self, request: Request, replica: int) -> None:
        self.tree.update(dict.fromkeys(request.blocks, replica))


class Indexed(Counting):
    """A policy that also follows the index."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.mirror = Mirror()
        for replica in self.replicas:
            self.mirror.join(str(replica))

    def hits(self, request: Request) -> list[int]:
        """How many leading blocks of the prompt each replica holds."""
        hits = self.mirror.hits(request.reusable)
        return [hits.get(str(replica), 0) for replica in self.replicas]

    def index_changed(
        self, replica: int, added: Sequence[Fingerprint], removed: Sequence[Fingerprint]
    ) -> None:
        self.mirror.remove(str(replica), removed)
        self.mirror.add(str(replica), added)


class Dynamo(Indexed):
    """NVIDIA Dynamo's default: blocks to prefill there, this prompt's included, plus blocks in use.

    From ai-dynamo/dynamo, lib/kv-router/src/scheduling/selector/default.rs, with an overlap
    credit of 1 without decay and temperature 0, KvRouterConfig's defaults there.
    """

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.prefill_tokens = [0] * setup.replicas
        self.in_use: list[Counter[Fingerprint]] = [Counter() for _ in self.replicas]
        self.new_tokens: dict[int, int] = {}  # request -> prompt tokens to compute

    def pick(self, request: Request) -> int:
        hits = self.hits(request)
        cost = [
            (self.prefill_tokens[r] + request.input_tokens) / request.block_tokens
            - hits[r]
            + len(self.in_use[r])
            + sum(block not in self.in_use[r] for block in request.blocks)
            for r in self.replicas
        ]
        replica = self.least(cost)
        hit_tokens = hits[replica] * request.block_tokens
        self.new_tokens[request.index] = request.input_tokens - hit_tokens
        return replica

    def sent(self, request: Request, replica: int) -> None:
        self.prefill_tokens[replica] += self.new_tokens[request.index]
        self.in_use[replica].update(request.blocks)

    def first_token(self, request: Request, now_s: float) -> None:
        super().first_token(request, now_s)
        self.prefill_tokens[self.at[request.index]] -= self.new_tokens.pop(request.index)

    def finished(self, request: Request) -> None:
        in_use = self.in_use[self.at[request.index]]
        super().finished(request)
        for block in request.blocks:
            in_use[block] -= 1
            if not in_use[block]:
                del in_use[block]


class LlmD(Indexed):
    """llm-d's scorers: 2 x cached share of the prompt + free KV share + shortness of the queue.

    From llm-d/llm-d-inference-scheduler: weights in
    deploy/config/epp-precise-prefix-cache-config.yaml, the queue's scale in queuedepth/README.md,
    speculative indexing in preciseprefixcache/README.md. It scrapes queues and KV use from vLLM;
    here its own counters replace them, minus the one request that no longer waits.
    """

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.kv_tokens = [0] * setup.replicas

    def pick(self, request: Request) -> int:
        blocks = max(1, len(request.reusable))
        hits = self.hits(request)
        waiting = [max(0, queued - 1) for queued in self.queued]
        longest, spread = max(waiting), max(waiting) - min(waiting)
        cost = [
            -2.0 * hits[r] / blocks
            - (1.0 - min(1.0, self.kv_tokens[r] / self.setup.kv_tokens))
            - ((longest - waiting[r]) / spread if spread else 1.0)
            for r in self.replicas
        ]
        return self.least(cost)

    def sent(self, request: Request, replica: int) -> None:
        self.kv_tokens[replica] += request.input_tokens
        self.mirror.expect(str(replica), request.blocks)

    def finished(self, request: Request) -> None:
        replica = self.at[request.index]
        super().finished(request)
        self.kv_tokens[replica] -= request.input_tokens
        self.mirror.unexpect(str(replica), request.blocks)


POLICIES: Mapping[str, Callable[[Setup, random.Random], Policy]] = {
    "kvroute": Production,
    **{name: partial(Baseline, name) for name in RANKINGS if name != "kvroute"},
    "consistent-hash": ConsistentHash,
    "ray-prefix": RayPrefix,
    "sglang": SGLang,
    "dynamo": Dynamo,
    "llm-d": LlmD,
    "min-ttft": MinTtft,
}
