"""The policies of llm-d: its default since version 1.0, and the score of the versions before."""

import random
from collections import deque
from collections.abc import Iterable, Sequence
from types import MappingProxyType

from kvroute.blocks.tiers import DISK, HOST
from kvroute.replay.policies.policy_protocol import LoadReport, PolicyDecision, Setup
from kvroute.replay.policies.rivals import Expecting, Indexed
from kvroute.replay.workload.trace import Request


class LlmD(Expecting):
    """llm-d 1.0: the replicas that hold most of the prompt, then the fewest tokens to compute.

    Replicas that hold at least AFFINITY of the prompt are kept, unless the best of them would take
    more than PENALTY_S longer than the best other one for the uncached tokens of its requests
    without a first token. If none is kept, all are. Of these, the one with the fewest uncached
    tokens gets the request, this prompt's included.

    The source is llm-d/llm-d-router, plugins/scheduling: filter/prefixcacheaffinity and
    scorer/tokenload, with their defaults. The speed of prefill is that of one full step, as its
    README asks. This model favours it: it knows the blocks of each replica from the index, and a
    prompt counts as cached as soon as it is sent.
    """

    AFFINITY = 0.8  # affinityThreshold
    PENALTY_S = 18.0  # maxTTFTPenaltyMs

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        step_s = setup.prefill.seconds(0, setup.chunk_tokens)
        self.penalty_tokens = self.PENALTY_S * setup.chunk_tokens / step_s

    def pick(self, request: Request) -> int:
        hits = self.hits(request)
        blocks = max(1, len(request.blocks))
        missing = [request.input_tokens - hit * request.block_tokens for hit in hits]
        replica = self.least_loaded(self.kept(hits, blocks), missing)
        self.new_tokens[request.index] = missing[replica]
        return replica

    def kept(self, hits: Sequence[float], blocks: int) -> Sequence[int]:
        """Return the replicas among which the load decides."""
        near = [r for r in self.replicas if hits[r] >= self.AFFINITY * blocks]
        far = [r for r in self.replicas if hits[r] < self.AFFINITY * blocks]
        if not near or not far:
            return self.replicas
        more = min(self.prefill_tokens[r] for r in near) - min(self.prefill_tokens[r] for r in far)
        return self.replicas if more > self.penalty_tokens else near

    def least_loaded(self, replicas: Sequence[int], missing: Sequence[float]) -> int:
        """Choose a replica by its load."""
        load = [self.prefill_tokens[r] + missing[r] for r in self.replicas]
        return self.cheapest(load, replicas)


class LlmDRequests(LlmD):
    """llm-d 1.0 with scorer/activerequest, for short prompts with long answers.

    Of the replicas that are kept, the one with the fewest unfinished requests gets the request.
    """

    def least_loaded(self, replicas: Sequence[int], missing: Sequence[float]) -> int:
        return self.cheapest(self.active, replicas)


class LlmDBlend(Indexed):
    """llm-d's score until August 2026, which it now calls its legacy blend.

    It is 2 x cached share of the prompt + free share of the KV cache + queue score.

    The source is llm-d/llm-d-inference-scheduler. The weights are those of
    deploy/config/epp-precise-prefix-cache-config.yaml, with speculative indexing off, its default.
    The queue score is 1 for the shortest queue and 0 for the longest, as in queuedepth/README.md.
    llm-d scrapes queues and KV use from vLLM, by default every 50 ms (refreshMetricsInterval).
    Here, a single router uses its own counters instead, which are never late. A block that is only
    in host memory counts as 0.8 of a hit, the default weight of `cpu` in llm-d-kv-cache-manager. So
    does one that is only on a disk, for which there is no default.
    """

    report_s = 0.05
    tier_credits = MappingProxyType({HOST: 0.8, DISK: 0.8})

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.kv_tokens = [0] * setup.replicas  # replica -> prompt tokens of its unfinished requests
        self.scraped: list[tuple[int, float]] | None = None  # replica -> queue length, KV use

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
        return self.cheapest(cost)

    def counted(self) -> list[tuple[int, float]]:
        """Return the queue length and KV use of each replica, from this router's own counters.

        One request without a first token is not in vLLM's queue, since vLLM computes it.
        """
        return [
            (max(0, queued - 1), min(1.0, tokens / self.setup.kv_tokens))
            for queued, tokens in zip(self.queued, self.kv_tokens, strict=True)
        ]

    def on_reports(self, reports: Sequence[LoadReport], now_s: float) -> None:
        capacity = self.setup.capacity_blocks
        self.scraped = [(load.waiting, load.used_blocks / capacity) for load, _ in reports]

    def on_dispatch(self, request: Request, replica: int) -> None:
        self.kv_tokens[replica] += request.input_tokens

    def on_finish(self, request: Request, now_s: float) -> None:
        self.kv_tokens[self.replica_of[request.index]] -= request.input_tokens
        super().on_finish(request, now_s)


class LlmDBlendSpeculative(LlmDBlend):
    """llm-d's old score with speculative indexing, as preciseprefixcache/README.md describes it.

    For EXPECTED_S, the blocks of a prompt count as cached on the replica to which it was sent.
    """

    EXPECTED_S = 2.0  # seconds; the default of llm-d

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.expected = deque[tuple[float, int, Request]]()  # time of sending, replica, request

    def take_decisions(self, now_s: float) -> Iterable[PolicyDecision]:
        while self.expected and self.expected[0][0] <= now_s - self.EXPECTED_S:
            _, replica, request = self.expected.popleft()
            self.mirror.unexpect(str(replica), request.blocks)
        decisions = list(super().take_decisions(now_s))
        self.expected += ((now_s, replica, request) for request, replica, *_ in decisions)
        return decisions

    def on_dispatch(self, request: Request, replica: int) -> None:
        super().on_dispatch(request, replica)
        self.mirror.expect(str(replica), request.blocks)
