"""Models of other routers' policies, written from their sources. Dynamo's is in dynamo.py."""

import math
import random
from bisect import bisect
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.messages import RouterMessage
from kvroute.replay.policies.protocol import LoadReport, Sending, Setup
from kvroute.replay.workload.trace import Request
from kvroute.router.index.mirror import Mirror
from kvroute.router.placement.baselines import RANKINGS
from kvroute.router.placement.policy import Candidate


class Counting:
    """A policy that counts its own requests and nothing else."""

    report_s = math.inf
    report_age_s = 0.0

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.replicas = range(setup.replicas)
        self.setup = setup
        self.rng = rng
        self.active = [0] * setup.replicas  # replica -> requests whose answer has not ended
        self.queued = [0] * setup.replicas  # replica -> requests without a first token
        self.at: dict[int, int] = {}  # request -> replica
        self._arrived: list[Request] = []

    def pick(self, request: Request) -> int:
        """Return the replica for this request."""
        raise NotImplementedError

    def arrived(self, request: Request, now_s: float) -> None:
        self._arrived.append(request)

    def sends(self, now_s: float) -> Iterable[Sending]:
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

    def finished(self, request: Request, now_s: float) -> None:
        self.active[self.at.pop(request.index)] -= 1

    def index_changed(
        self, replica: int, added: Sequence[Fingerprint], removed: Sequence[Fingerprint]
    ) -> None: ...

    def reported(self, reports: Sequence[LoadReport], now_s: float) -> None: ...

    def take_message(self, now_s: float) -> RouterMessage | None:
        return None

    def receive(self, message: RouterMessage, now_s: float) -> None: ...

    def least(self, cost: Sequence[float], among: Sequence[int] | None = None) -> int:
        """Return the replica with the least cost, a random one among equals."""
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
        return int(self._rank(candidates, rng=self.rng, busy_s=1.0)[0].replica_id)


class ConsistentHash(Counting):
    """A ring with 100 points per replica.

    The key is the session. If the trace names no session, the key is the prompt's first two
    blocks, since all prompts may share the first one.
    """

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        points = random.Random(0)  # every router has the same ring
        self.ring = sorted(
            (points.random(), replica) for replica in self.replicas for _ in [0] * 100
        )

    def pick(self, request: Request) -> int:
        key = random.Random(request.session or str(request.blocks[:2])).random()
        return self.ring[bisect(self.ring, (key,)) % len(self.ring)][1]


class SGLang(Counting):
    """SGLang's cache_aware: least load if unbalanced, else the longest match above 30%.

    From sgl-project/sglang, sgl-model-gateway/src/policies/cache_aware.rs; thresholds are the
    defaults of RouterArgs. It stores where it last sent each block. Nothing is evicted, because its
    tree is larger than a trace.
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

    tier_credit = 1.0  # value of a block in a slower tier only; a block in GPU memory counts 1

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.mirror = Mirror()
        for replica in self.replicas:
            self.mirror.join(str(replica))

    def hits(self, request: Request) -> list[float]:
        """Return the value of the prompt's leading blocks on each replica."""
        hits = self.mirror.hits(request.reusable)
        gpu = [hits.get(str(replica), 0) for replica in self.replicas]
        counts: list[float] = [*gpu]
        for tier in self.setup.tiers:
            hits = self.mirror.hits([*map(tier.fingerprint, request.reusable)])
            for replica, near in enumerate(gpu):
                counts[replica] += self.tier_credit * max(0, hits.get(str(replica), 0) - near)
        return counts

    def index_changed(
        self, replica: int, added: Sequence[Fingerprint], removed: Sequence[Fingerprint]
    ) -> None:
        self.mirror.remove(str(replica), removed)
        self.mirror.add(str(replica), added)


class Prefilling(Indexed):
    """Least cost, by the prompt tokens to compute on each replica."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.prefill_tokens: list[float] = [0] * setup.replicas
        self.new_tokens: dict[int, float] = {}  # request index -> prompt tokens to compute

    def missing_tokens(self, request: Request) -> list[float]:
        """Return the prompt tokens that each replica has to compute."""
        return [request.input_tokens - hit * request.block_tokens for hit in self.hits(request)]

    def pick(self, request: Request) -> int:
        missing = self.missing_tokens(request)
        replica = self.least(self.cost(request, missing))
        self.new_tokens[request.index] = missing[replica]
        return replica

    def cost(self, request: Request, missing: Sequence[float]) -> list[float]:
        """Return the cost of each replica, which has to compute `missing` tokens of the prompt."""
        raise NotImplementedError

    def sent(self, request: Request, replica: int) -> None:
        self.prefill_tokens[replica] += self.new_tokens[request.index]

    def first_token(self, request: Request, now_s: float) -> None:
        super().first_token(request, now_s)
        self.prefill_tokens[self.at[request.index]] -= self.new_tokens.pop(request.index)


class LMetric(Prefilling):
    """A replica's pending prompt tokens times its requests, both with this request.

    From "LMetric: Simple is Better - Multiplication May Be All You Need for LLM Request
    Scheduling", arXiv 2603.15202. In its favour, a prompt counts as cached as soon as it was sent.
    """

    def cost(self, request: Request, missing: Sequence[float]) -> list[float]:
        return [(self.prefill_tokens[r] + missing[r]) * (self.active[r] + 1) for r in self.replicas]

    def sent(self, request: Request, replica: int) -> None:
        super().sent(request, replica)
        self.mirror.expect(str(replica), request.blocks)

    def finished(self, request: Request, now_s: float) -> None:
        self.mirror.unexpect(str(self.at[request.index]), request.blocks)
        super().finished(request, now_s)


class LlmD(Indexed):
    """llm-d's scorers: 2 x cached share of the prompt + free KV share + shortness of the queue.

    From llm-d/llm-d-inference-scheduler: weights in
    deploy/config/epp-precise-prefix-cache-config.yaml, which leaves speculative indexing at its
    default, off; the queue's scale in queuedepth/README.md. It scrapes queues and KV use from vLLM,
    every 50 ms by default (refreshMetricsInterval). A single router uses its own counters here
    instead, which are never late, minus the one request that runs. A block in host memory only
    counts 0.8, the default weight of `cpu` in llm-d-kv-cache-manager.
    """

    report_s = 0.05
    tier_credit = 0.8

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.kv_tokens = [0] * setup.replicas
        self.scraped: list[tuple[int, float]] | None = None  # replica -> waiting, KV use

    def pick(self, request: Request) -> int:
        blocks = max(1, len(request.reusable))
        hits = self.hits(request)
        waiting, kv_use = zip(*(self.scraped or self.counted()), strict=True)
        longest, spread = max(waiting), max(waiting) - min(waiting)
        cost = [
            -2.0 * hits[r] / blocks
            - (1.0 - kv_use[r])
            - ((longest - waiting[r]) / spread if spread else 1.0)
            for r in self.replicas
        ]
        return self.least(cost)

    def counted(self) -> list[tuple[int, float]]:
        """Return what a scrape would show now if this router were the only one."""
        return [
            (max(0, queued - 1), min(1.0, tokens / self.setup.kv_tokens))
            for queued, tokens in zip(self.queued, self.kv_tokens, strict=True)
        ]

    def reported(self, reports: Sequence[LoadReport], now_s: float) -> None:
        capacity = self.setup.capacity_blocks
        self.scraped = [(load.waiting, load.used_blocks / capacity) for load, _ in reports]

    def sent(self, request: Request, replica: int) -> None:
        self.kv_tokens[replica] += request.input_tokens

    def finished(self, request: Request, now_s: float) -> None:
        self.kv_tokens[self.at[request.index]] -= request.input_tokens
        super().finished(request, now_s)


class LlmDSpeculative(LlmD):
    """llm-d with speculative indexing, as in preciseprefixcache/README.md.

    A prompt's blocks count as cached on the replica that it was sent to, for EXPECTED_S.
    """

    EXPECTED_S = 2.0  # llm-d's default

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.expected = deque[tuple[float, int, Request]]()  # time of sending, replica, request

    def sends(self, now_s: float) -> Iterable[Sending]:
        while self.expected and self.expected[0][0] <= now_s - self.EXPECTED_S:
            _, replica, request = self.expected.popleft()
            self.mirror.unexpect(str(replica), request.blocks)
        sendings = list(super().sends(now_s))
        self.expected += ((now_s, replica, request) for request, replica, *_ in sendings)
        return sendings

    def sent(self, request: Request, replica: int) -> None:
        super().sent(request, replica)
        self.mirror.expect(str(replica), request.blocks)
