"""Models of other routers' policies, based on their source code. dynamo.py has Dynamo's."""

import math
import random
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import DISK, HOST, Tier
from kvroute.contract.messages import RouterMessage
from kvroute.replay.policies.policy_protocol import LoadReport, PolicyDecision, Setup
from kvroute.replay.workload.trace import Request
from kvroute.replica.fabric.pull import PullResult
from kvroute.router.index.mirror import Mirror
from kvroute.router.placement.baselines import RANKINGS
from kvroute.router.placement.policy import NO_PRICES, Candidate


class Counting:
    """A policy that knows only the requests that it has sent itself."""

    report_s = math.inf
    report_age_s = 0.0

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.replicas = range(setup.replicas)
        self.setup = setup
        self.rng = rng
        self.active = [0] * setup.replicas  # replica -> number of unfinished requests
        self.queued = [0] * setup.replicas  # replica -> number of requests without a first token
        self.replica_of: dict[int, int] = {}  # request index -> its replica
        self._new: list[Request] = []

    def pick(self, request: Request) -> int:
        """Choose the replica for a request."""
        raise NotImplementedError

    def on_arrival(self, request: Request, now_s: float) -> None:
        self._new.append(request)

    def take_decisions(self, now_s: float) -> Iterable[PolicyDecision]:
        new, self._new = self._new, []
        return [PolicyDecision(request, self.choose(request)) for request in new]

    def wake_after_s(self) -> float | None:
        return None

    def choose(self, request: Request) -> int:
        """Choose the replica for a request, and count the request."""
        replica = self.pick(request)
        self.replica_of[request.index] = replica
        self.active[replica] += 1
        self.queued[replica] += 1
        self.on_dispatch(request, replica)
        return replica

    def on_dispatch(self, request: Request, replica: int) -> None:
        """Record that a request goes to a replica."""

    def on_pulled(self, request: Request, result: PullResult, now_s: float) -> None: ...

    def on_first_token(self, request: Request, now_s: float) -> None:
        self.queued[self.replica_of[request.index]] -= 1

    def on_finish(self, request: Request, now_s: float) -> None:
        self.active[self.replica_of.pop(request.index)] -= 1

    def on_index_change(
        self, replica: int, added: Sequence[Fingerprint], removed: Sequence[Fingerprint]
    ) -> None: ...

    def on_reports(self, reports: Sequence[LoadReport], now_s: float) -> None: ...

    def take_message(self, now_s: float) -> RouterMessage | None:
        return None

    def receive(self, message: RouterMessage, now_s: float) -> None: ...

    def cheapest(self, cost: Sequence[float], among: Sequence[int] | None = None) -> int:
        """Return the replica with the lowest cost; choose at random among equal ones."""
        return min(among or self.replicas, key=lambda replica: (cost[replica], self.rng.random()))


class Baseline(Counting):
    """A baseline policy that real routers offer as well (`kvroute serve --policy`)."""

    def __init__(self, name: str, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self._rank = RANKINGS[name]()

    def pick(self, request: Request) -> int:
        candidates = [
            Candidate(f"{replica:05}", 0, 0.0, 0.0, unanswered=active)
            for replica, active in enumerate(self.active)
        ]
        return int(self._rank(candidates, rng=self.rng, prices=NO_PRICES)[0].replica_id)


class ConsistentHash(Counting):
    """Consistent hashing on a ring with 100 points per replica.

    The key is the session. If the trace has no sessions, the key is the prompt's first two
    blocks, since all prompts may share the first block.
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


class StickyLeastLoaded(Counting):
    """vLLM router's sticky_least_loaded: a session stays where there were the fewest sessions.

    The source is the vllm-router 0.1.17 package, --policy sticky_least_loaded. A session ends with
    the client's hint. Its expiry after an idle time is not modelled. A request without a session is
    a session of its own, which ends with its answer.
    """

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.home: dict[str, int] = {}  # session -> its replica
        self.sessions = [0] * setup.replicas  # replica -> number of its sessions

    def pick(self, request: Request) -> int:
        name = self.name(request)
        if name not in self.home:
            self.home[name] = self.cheapest(self.sessions)
            self.sessions[self.home[name]] += 1
        return self.home[name]

    def name(self, request: Request) -> str:
        """Return the name of the request's session."""
        return request.session or f"request {request.index}"

    def on_finish(self, request: Request, now_s: float) -> None:
        super().on_finish(request, now_s)
        if request.is_end or not request.session:
            self.sessions[self.home.pop(self.name(request))] -= 1


class SGLang(Counting):
    """SGLang's cache_aware: the replica to which most of the prompt was last sent.

    If that is at most 30% of the prompt, or if the load is unbalanced, it is the least loaded
    replica. The source is sgl-project/sglang, sgl-model-gateway/src/policies/cache_aware.rs, with
    the default thresholds of RouterArgs. The policy remembers for each block the replica to which
    it was last sent, and forgets none, since its tree is larger than a trace.
    """

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.tree: dict[Fingerprint, int] = {}  # block -> replica to which it was last sent

    def pick(self, request: Request) -> int:
        highest, lowest = max(self.active), min(self.active)
        if highest - lowest > 64 and highest > 1.5 * lowest:
            return self.cheapest(self.active)
        matched = list(takewhile(self.tree.__contains__, request.blocks))
        if len(matched) * request.block_tokens > 0.3 * request.input_tokens:
            return self.tree[matched[-1]]
        return self.cheapest(self.active)

    def on_dispatch(self, request: Request, replica: int) -> None:
        self.tree.update(dict.fromkeys(request.blocks, replica))


class Indexed(Counting):
    """A policy that also knows which replica has cached which blocks, from the index."""

    # Value of a block that is only in a slower tier; 1 is a block in GPU memory.
    tier_credits: Mapping[Tier, float] = MappingProxyType({HOST: 1.0, DISK: 1.0})

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.mirror = Mirror()
        for replica in self.replicas:
            self.mirror.join(str(replica))

    def hits(self, request: Request) -> list[float]:
        """Return the value of the cached prefix on each replica, in blocks."""
        hits = self.mirror.hits(request.reusable)
        best = [hits.get(str(replica), 0) for replica in self.replicas]
        values: list[float] = [*best]
        for tier in self.setup.tiers:
            hits = self.mirror.hits([*map(tier.fingerprint, request.reusable)])
            for replica, faster in enumerate(best):
                more = max(0, hits.get(str(replica), 0) - faster)
                values[replica] += self.tier_credits[tier] * more
                best[replica] += more
        return values

    def on_index_change(
        self, replica: int, added: Sequence[Fingerprint], removed: Sequence[Fingerprint]
    ) -> None:
        self.mirror.remove(str(replica), removed)
        self.mirror.add(str(replica), added)


class Prefilling(Indexed):
    """A policy whose cost depends on the prompt tokens that each replica has to compute."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        super().__init__(setup, rng)
        self.prefill_tokens: list[float] = [0] * setup.replicas
        self.new_tokens: dict[int, float] = {}  # request index -> prompt tokens to compute

    def missing_tokens(self, request: Request) -> list[float]:
        """Return how many tokens of the prompt each replica would have to compute."""
        return [request.input_tokens - hit * request.block_tokens for hit in self.hits(request)]

    def pick(self, request: Request) -> int:
        missing = self.missing_tokens(request)
        replica = self.cheapest(self.cost(request, missing))
        self.new_tokens[request.index] = missing[replica]
        return replica

    def cost(self, request: Request, missing: Sequence[float]) -> list[float]:
        """Return each replica's cost; `missing` has the prompt tokens that it has to compute."""
        raise NotImplementedError

    def on_dispatch(self, request: Request, replica: int) -> None:
        self.prefill_tokens[replica] += self.new_tokens[request.index]

    def on_first_token(self, request: Request, now_s: float) -> None:
        super().on_first_token(request, now_s)
        self.prefill_tokens[self.replica_of[request.index]] -= self.new_tokens.pop(request.index)


class Expecting(Prefilling):
    """A policy for which a prompt counts as cached as soon as it is sent, until its answer ends."""

    def on_dispatch(self, request: Request, replica: int) -> None:
        super().on_dispatch(request, replica)
        self.mirror.expect(str(replica), request.blocks)

    def on_finish(self, request: Request, now_s: float) -> None:
        self.mirror.unexpect(str(self.replica_of[request.index]), request.blocks)
        super().on_finish(request, now_s)


class LMetric(Expecting):
    """LMetric: the cost is a replica's pending prompt tokens times its number of requests.

    Both numbers include this request. The source is "LMetric: Simple is Better - Multiplication May
    Be All You Need for LLM Request Scheduling", arXiv 2603.15202. This model
    favours it: a prompt counts as cached as soon as it is sent.
    """

    def cost(self, request: Request, missing: Sequence[float]) -> list[float]:
        return [(self.prefill_tokens[r] + missing[r]) * (self.active[r] + 1) for r in self.replicas]
