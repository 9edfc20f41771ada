"""Routing policies side by side: ours as it runs in production, the others from their sources.

Every policy knows what a router knows: the index, late by its delay, and its own requests.
"""

import random
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from replica.kvindex.fingerprint import Fingerprint
from replica.kvindex.index import ReplicaRecord
from router.replay.trace import Request
from router.routing.fleet import Fleet
from router.routing.load import PrefillModel
from router.routing.mirror import Mirror
from router.routing.peers import Listener, Loudspeaker, Message
from router.routing.policy import Candidate
from router.routing.trips import Placement, Trip


@dataclass(frozen=True, slots=True)
class Setup:
    """What a router knows of its replicas from the start."""

    replicas: int
    kv_tokens: int
    prefill: PrefillModel
    block_tokens: int

    @property
    def capacity_blocks(self) -> int:
        return self.kv_tokens // self.block_tokens


class Policy(Protocol):
    """One router's judgement and all that it learns from."""

    def choose(self, request: Request, now_s: float) -> int:
        """The replica that the request is sent to, at once."""

    def first_token(self, request: Request, now_s: float) -> None: ...

    def finished(self, request: Request) -> None: ...

    def index_changed(
        self, replica: int, added: Sequence[Fingerprint], removed: Sequence[Fingerprint]
    ) -> None: ...

    def said(self) -> Message | None:
        """What it has to tell the other routers since the last time."""

    def hear(self, message: Message, now_s: float) -> None:
        """Another router's, a little later."""


class Production:
    """kvroute: the Fleet, loads, branches, ranking and talk of a Router, on the trace's clock."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self._names = [str(replica) for replica in range(setup.replicas)]
        self._now_s = 0.0
        self._loudspeaker = Loudspeaker()
        self._fleet = Fleet(
            model="replay",
            revision="",
            block_size=setup.block_tokens,
            rng=rng,
            witness=self._loudspeaker,
        )
        self._listener = Listener(
            self._fleet, own=self._loudspeaker.router, clock=lambda: self._now_s
        )
        self._trips: dict[int, Trip] = {}
        facts = {
            "prefill_tokens_per_s": setup.prefill.tokens_per_s,
            "attention_tokens": setup.prefill.attention_tokens,
            "prefix_caching": True,
            "capacity_blocks": setup.capacity_blocks,
        }
        load = {"running": 0, "waiting": 0, "used_blocks": 0}
        self._fleet.update(ReplicaRecord(name, "replay", 0, facts, load) for name in self._names)
        for name in self._names:
            self._fleet.mirror.join(name)

    def choose(self, request: Request, now_s: float) -> int:
        placement = self._fleet.place_chain(
            request.reusable, request.input_tokens, self._names, now_s
        )
        best = self.best(placement).replica_id
        self._trips[request.index] = self._fleet.sent(placement, best, str(request.index), now_s)
        return int(best)

    def best(self, placement: Placement) -> Candidate:
        return placement.ranking[0]

    def first_token(self, request: Request, now_s: float) -> None:
        self._trips[request.index].first_token(now_s)

    def finished(self, request: Request) -> None:
        self._trips.pop(request.index).end()

    def index_changed(
        self, replica: int, added: Sequence[Fingerprint], removed: Sequence[Fingerprint]
    ) -> None:
        self._fleet.mirror.remove(self._names[replica], removed)
        self._fleet.mirror.add(self._names[replica], added)

    def said(self) -> Message | None:
        message = self._loudspeaker.take()
        return message if message.events else None

    def hear(self, message: Message, now_s: float) -> None:
        self._now_s = now_s
        self._listener.hear(message)


class MinTtft(Production):
    """Soonest first token for this request alone: queued prefill, and its own with the best hit.

    Mooncake's rule as it is commonly described, without transfers of KV between replicas; ours
    with every term but W, own and copy left out.
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

    def pick(self, request: Request) -> int:
        """The replica for this request."""
        raise NotImplementedError

    def choose(self, request: Request, now_s: float) -> int:
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

    def said(self) -> Message | None:
        return None

    def hear(self, message: Message, now_s: float) -> None: ...

    def least(self, cost: Sequence[float], among: Sequence[int] | None = None) -> int:
        """The replica of the least cost; by chance where several have it."""
        return min(among or self.replicas, key=lambda replica: (cost[replica], self.rng.random()))


class Random(Counting):
    """Any replica."""

    def pick(self, request: Request) -> int:
        return self.rng.choice(self.replicas)


class RoundRobin(Counting):
    """Each replica in turn."""

    turn = -1

    def pick(self, request: Request) -> int:
        self.turn = (self.turn + 1) % len(self.replicas)
        return self.turn


class LeastLoaded(Counting):
    """The fewest unanswered requests."""

    def pick(self, request: Request) -> int:
        return self.least(self.active)


class PowerOfTwo(Counting):
    """The less loaded of two at random, as ray.serve's PowerOfTwoChoicesRequestRouter."""

    def pick(self, request: Request) -> int:
        pair = self.rng.sample(self.replicas, min(2, len(self.replicas)))
        return self.least(self.active, pair)


class ConsistentHash(Counting):
    """A ring of 100 points a replica.

    A trace names no sessions, so the first two blocks stand for one: all prompts may share one.
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

    Read in ray 2.60, ray/llm/_internal/serve/routing_policies/prefix_aware. It remembers what it
    sent where; the shorter queue among the longest matches, or else among those sent least text.
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

    Read in sgl-project/sglang, sgl-model-gateway/src/policies/cache_aware.rs; thresholds are
    RouterArgs' defaults there. It remembers what it sent where, without eviction: its
    tree has room for more than this.
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
    """A policy that follows the index besides."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.mirror = Mirror()
        for replica in self.replicas:
            self.mirror.join(str(replica))

    def hits(self, request: Request) -> list[int]:
        """Leading blocks of the prompt that each replica holds."""
        hits = self.mirror.hits(request.reusable)
        return [hits.get(str(replica), 0) for replica in self.replicas]

    def index_changed(
        self, replica: int, added: Sequence[Fingerprint], removed: Sequence[Fingerprint]
    ) -> None:
        self.mirror.remove(str(replica), removed)
        self.mirror.add(str(replica), added)


class Dynamo(Indexed):
    """NVIDIA Dynamo's default: blocks to prefill there, this prompt's included, plus blocks in use.

    Read in ai-dynamo/dynamo, lib/kv-router/src/scheduling/selector/default.rs, with an overlap
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
    """llm-d's scorers: 2 x share of the prompt cached + KV room + shortness of the queue.

    Read in llm-d/llm-d-inference-scheduler: weights in
    deploy/config/epp-precise-prefix-cache-config.yaml, the queue's scale in queuedepth/README.md,
    speculative indexing in preciseprefixcache/README.md. It scrapes queues and KV use from vLLM;
    here its own counters stand for them, less the one request that is no longer waiting there.
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
    "random": Random,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "power-of-two": PowerOfTwo,
    "consistent-hash": ConsistentHash,
    "ray-prefix": RayPrefix,
    "sglang": SGLang,
    "dynamo": Dynamo,
    "llm-d": LlmD,
    "min-ttft": MinTtft,
}
