"""The policy and the router queue of NVIDIA Dynamo."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replay.policies.protocol import Sending, Setup
from kvroute.replay.policies.rivals import Prefilling
from kvroute.replay.workload.trace import Request

QUEUE_STEPS = 16  # engine steps of pending prompt tokens above which a replica gets no request


class Dynamo(Prefilling):
    """Dynamo's default cost: blocks to prefill on a replica, with this prompt, plus blocks in use.

    From ai-dynamo/dynamo, lib/kv-router/src/scheduling: selector/default.rs, with an overlap
    credit of 1 without decay and temperature 0, KvRouterConfig's defaults there.

    Its queue, from queue.rs, policy.rs and config.rs: while every replica has more prompt tokens to
    compute than router_queue_threshold (16) x max_num_batched_tokens, requests wait, by default
    first come, first served. Hits are looked up again when a request leaves the queue, as in
    Dynamo's overlap refresh.

    A block in host memory only counts 0.75, the default of Dynamo's host_cache_hit_weight.
    """

    tier_credit = 0.75

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.in_use: list[Counter[Fingerprint]] = [Counter() for _ in self.replicas]
        self.waiting: list[tuple[float, int, Request]] = []  # heap: turn, index

    def arrived(self, request: Request, now_s: float) -> None:
        heappush(self.waiting, (self.turn(request, now_s), request.index, request))

    def sends(self, now_s: float) -> Iterator[Sending]:
        while self.waiting and self.has_room():
            request = heappop(self.waiting)[2]
            yield Sending(request, self.choose(request))

    def turn(self, request: Request, now_s: float) -> float:
        """Return the sort key of the queue: the time of arrival, as in Dynamo's `fcfs`."""
        return now_s

    def has_room(self) -> bool:
        return min(self.prefill_tokens) <= QUEUE_STEPS * self.setup.chunk_tokens

    def cost(self, request: Request, missing: Sequence[float]) -> list[float]:
        return [
            (self.prefill_tokens[r] + missing[r]) / request.block_tokens
            + len(self.in_use[r])
            + sum(block not in self.in_use[r] for block in request.blocks)
            for r in self.replicas
        ]

    def sent(self, request: Request, replica: int) -> None:
        super().sent(request, replica)
        self.in_use[replica].update(request.blocks)

    def finished(self, request: Request, now_s: float) -> None:
        in_use = self.in_use[self.at[request.index]]
        super().finished(request, now_s)
        for block in request.blocks:
            in_use[block] -= 1
            if not in_use[block]:
                del in_use[block]


class DynamoShortestFirst(Dynamo):
    """Dynamo with router_queue_policy `wspt`, weighted shortest processing time.

    The request with the fewest tokens to compute goes first, by the best hits on its arrival. All
    weights are 1.
    """

    def turn(self, request: Request, now_s: float) -> float:
        return max(1, min(self.missing_tokens(request)))
