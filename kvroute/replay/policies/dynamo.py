"""The policy and the router queue of NVIDIA Dynamo."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from types import MappingProxyType

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import DISK, HOST
from kvroute.replay.policies.policy_protocol import PolicyDecision, Setup
from kvroute.replay.policies.rivals import Prefilling
from kvroute.replay.workload.trace import Request

QUEUE_STEPS = 16  # a replica has no capacity if its prompt tokens take more engine steps than this


class Dynamo(Prefilling):
    """Dynamo's default: the cost of a replica is its blocks to prefill plus its blocks in use.

    Both numbers include this prompt. The source is ai-dynamo/dynamo, lib/kv-router/src/scheduling:
    selector/default.rs, with KvRouterConfig's defaults: an overlap credit of 1 without decay (a
    cached block costs nothing), and temperature 0 (the cheapest replica always gets the request).

    The queue follows queue.rs, policy.rs and config.rs. Requests wait while every replica has more
    prompt tokens to compute than router_queue_threshold (16) x max_num_batched_tokens. By default
    the order is first come, first served. Hits are looked up again when a request leaves the queue,
    as in Dynamo's overlap refresh.

    A block that is only in host memory counts as 0.75 of a hit, the default host_cache_hit_weight.
    One that is only on a disk counts as 0.25, the default disk_cache_hit_weight.
    """

    tier_credits = MappingProxyType({HOST: 0.75, DISK: 0.25})

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        # For each replica: block -> number of unfinished requests that use the block.
        self.in_use: list[Counter[Fingerprint]] = [Counter() for _ in self.replicas]
        self.waiting: list[tuple[float, int, Request]] = []  # heap: sort key, index, request

    def on_arrival(self, request: Request, now_s: float) -> None:
        heappush(self.waiting, (self.sort_key(request, now_s), request.index, request))

    def take_decisions(self, now_s: float) -> Iterator[PolicyDecision]:
        while self.waiting and self.has_capacity():
            request = heappop(self.waiting)[2]
            yield PolicyDecision(request, self.choose(request))

    def sort_key(self, request: Request, now_s: float) -> float:
        """Return the sort key of the queue: the time of arrival, as in Dynamo's `fcfs`."""
        return now_s

    def has_capacity(self) -> bool:
        """Return whether at least one replica has few enough prompt tokens to compute."""
        return min(self.prefill_tokens) <= QUEUE_STEPS * self.setup.chunk_tokens

    def cost(self, request: Request, missing: Sequence[float]) -> list[float]:
        return [
            (self.prefill_tokens[r] + missing[r]) / request.block_tokens
            + len(self.in_use[r])
            + sum(block not in self.in_use[r] for block in request.blocks)
            for r in self.replicas
        ]

    def on_dispatch(self, request: Request, replica: int) -> None:
        super().on_dispatch(request, replica)
        self.in_use[replica].update(request.blocks)

    def on_finish(self, request: Request, now_s: float) -> None:
        in_use = self.in_use[self.replica_of[request.index]]
        super().on_finish(request, now_s)
        for block in request.blocks:
            in_use[block] -= 1
            if not in_use[block]:
                del in_use[block]


class DynamoShortestFirst(Dynamo):
    """Dynamo with router_queue_policy `wspt`, weighted shortest processing time.

    The request with the fewest prompt tokens to compute is first. These tokens are counted when it
    arrives, for the replica with the most hits. All weights are 1.
    """

    def sort_key(self, request: Request, now_s: float) -> float:
        return max(1, min(self.missing_tokens(request)))
