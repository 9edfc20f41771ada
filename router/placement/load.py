"""The load of one replica: its unanswered requests as this router knows them, and its speed.

The speed is a correction of the prefill times that the replica's own speed model predicts. The
correction is called slowness: the measured prefill time divided by the predicted one.

This module has no clock: the caller passes the time, in seconds of any monotonic clock.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.variants import VariantCache
from kvroute.prefill.prefill_queue import PrefillQueue
from kvroute.prefill.speed import MIN_SLOWNESS, PrefillModel, PrefillSpeed, Speed
from kvroute.router.placement.kv_use import KvUse

# A replica counts as normal if its slowness differs from the median of all replicas by at most this
# share of the median.
NEAR = 0.25
SLOW = 1.5  # a replica that takes this many times as long as the others is reported as slow
TYPICAL_STEPS = 2.0  # assumed mean prefill time until requests have come, in full engine steps
MEAN_SHARE = 0.05  # weight of the newest request in the moving averages
UNLIMITED = 1 << 30  # assumed capacity for variants until a replica has reported its own
# Time that decoding adds to an engine step, relative to prefill. This ratio is similar on all GPUs,
# since memory bandwidth and compute grow together: for 8B and 70B models on L4, A100, H100 and
# H200, a token of context adds 3e-4 to 13e-4 times the prefill time of a token.
DECODE_REQUEST = 6e-5  # each decoding request adds this share of the prefill time of a full step
DECODE_TOKEN = 7e-4  # each token of its context adds this share of the prefill time of one token


@dataclass(slots=True)
class Reloads:
    """Pending copies from slower tiers, such as host memory, to the replica's GPU memory.

    They are made for this router's requests. A copy delays its own request and the copies after it.
    It takes no compute time of the GPU.
    """

    _waiting: set[str] = field(default_factory=set)  # ids of the requests that wait for a copy
    _end_s: float = -math.inf  # predicted end of the last copy

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until all pending copies should be done."""
        return max(0.0, self._end_s - now_s)

    def begin(self, request_id: str, end_s: float) -> None:
        """Add a copy for a request, which is predicted to end at `end_s`."""
        self._end_s = max(self._end_s, end_s)
        self._waiting.add(request_id)

    def end(self, request_id: str) -> None:
        """Remove the copy of a request that has got its first token or has failed."""
        self._waiting.discard(request_id)
        if not self._waiting:
            self._end_s = -math.inf


@dataclass(slots=True)
class PendingRequest:
    """A request that waits for its first token."""

    prefill_s: float  # prefill time that the speed model predicts
    new_tokens: int  # tokens of the prompt that the replica has to compute
    prompt_tokens: int
    sent_s: float  # time at which it was sent
    variant: str = ""  # the variant of the model; see Scope
    # True if the replica first loads a variant or copies blocks back. The time to the first token
    # then does not show the speed of prefill.
    loads_first: bool = False
    # Seconds until blocks are copied back from slower tiers, such as host memory. It is 0 for
    # requests of other routers, since routers do not publish this time.
    reload_s: float = 0.0
    # Seconds that terms of features delay it, while the engine computes other prompts. This is 0
    # for requests of other routers, too.
    terms_s: float = 0.0
    prefix: Fingerprint | None = None  # last block of its prompt that any replica had
    blocks: Collection[Fingerprint] = ()  # blocks that it computes; known for batch requests only

    @property
    def ready_s(self) -> float:
        """Return the earliest time at which the engine can compute the prompt."""
        return self.sent_s + self.reload_s + self.terms_s

    @property
    def waits_for_copies(self) -> bool:
        """Return whether the prompt waits for blocks to be copied back.

        The engine computes other prompts meanwhile. While it loads a variant, it computes nothing.
        """
        return self.reload_s > 0 or self.terms_s > 0 or (self.loads_first and not self.variant)


class PromptCost:
    """The time to compute one prompt on each replica.

    Costs are kept for the next replica, if that has the same speed and the same hit.

    Args:
        tokens: tokens of the prompt.
        best_hit_blocks: blocks of the longest hit on any replica.
        block_size: tokens of a block.
    """

    def __init__(self, tokens: int, best_hit_blocks: int, block_size: int) -> None:
        self.tokens = tokens
        self._best_tokens = best_hit_blocks * block_size
        self._block_size = block_size
        self._model: PrefillModel | None = None
        self._costs: dict[int, tuple[int, float, float]] = {}

    def on(self, model: PrefillModel, hit_blocks: int) -> tuple[int, float, float]:
        """Return the cost of the prompt on a replica with this speed and this hit.

        Returns:
            The number of tokens that the replica has to compute, the seconds for the part of these
            tokens that no replica has cached, and the seconds for the part that another replica has
            cached.
        """
        if model is not self._model:
            self._model, self._costs = model, {}
        if hit_blocks not in self._costs:
            hit_tokens = hit_blocks * self._block_size
            self._costs[hit_blocks] = (
                self.tokens - hit_tokens,
                model.seconds(self._best_tokens, self.tokens),
                model.seconds(hit_tokens, self._best_tokens),
            )
        return self._costs[hit_blocks]


@dataclass(slots=True)
class ReplicaLoad(PrefillQueue[PendingRequest]):
    """The requests that wait for their first token at one replica, and those that decode there."""

    model: PrefillModel  # the prefill speed that the replica reports
    step_tokens: int = 8192  # the most tokens that the engine computes in one step
    capacity_tokens: int = 0  # capacity of its KV cache; 0: unknown
    decoding: dict[str, int] = field(default_factory=dict)  # request id -> prompt tokens
    # The following sums and means are updated with each request, since every placement reads them.
    pending_tokens: int = 0  # prompt tokens that the replica still has to compute
    decoding_tokens: int = 0  # context tokens of all decoding requests
    decode_step_s: float = 0.0  # seconds that the decoding requests add to each engine step
    mean_prefill_s: float = 0.0  # moving average of the requests' predicted prefill times
    prefilled_s: float = 0.0  # predicted prefill time of all requests that got their first token
    # Loaded variants of the model.
    variants: VariantCache = field(default_factory=lambda: VariantCache(UNLIMITED))
    # Variants of the requests that were sent since the replica's latest report, and of the requests
    # that were sent between its latest two reports.
    variants_sent: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    # Maximum of pending_tokens since the latest report, and between the latest two reports.
    peaks: tuple[int, int] = (0, 0)
    mean_tokens: float = 0.0  # moving average of the requests' tokens to compute
    reloads: Reloads = field(default_factory=Reloads)  # pending copies from slower tiers
    kv: KvUse = field(default_factory=KvUse)  # KV cache that unanswered requests hold
    held_tokens: int = 0  # tokens that running requests and pins hold, by the latest report
    engine_waiting: int = 0  # requests in the engine's queue, by the latest report
    answer_tokens: float = 0.0  # moving average of the length of answers

    def computing_s(self, begin: int, end: int) -> float:
        """Return the time to compute a prompt's tokens `begin` to `end`, at the measured speed."""
        return self.speed.slowness * self.model.seconds(begin, end)

    def send(self, request_id: str, sent: PendingRequest) -> None:
        """Add a request that is sent to the replica."""
        self.join(request_id, sent)
        self.kv.add(
            request_id,
            new_tokens=sent.new_tokens,
            cached_tokens=sent.prompt_tokens - sent.new_tokens,
            prefix=sent.prefix,
            blocks=sent.blocks,
        )
        if sent.reload_s:
            self.reloads.begin(request_id, sent.sent_s + sent.reload_s)
        if sent.variant:
            self.variants.use(sent.variant)
            self.variants_sent[0].append(sent.variant)
        self.pending_tokens += sent.new_tokens
        self.mean_prefill_s += MEAN_SHARE * (sent.prefill_s - self.mean_prefill_s)
        self.mean_tokens += MEAN_SHARE * (sent.new_tokens - self.mean_tokens)
        self.peaks = (max(self.peaks[0], self.pending_tokens), self.peaks[1])

    def report_variants(self, names: Iterable[str], capacity: int) -> None:
        """Record the variants that the replica reports as loaded.

        The report may describe a state from up to two reporting intervals ago. So the variants of
        requests that were sent in this time count as loaded, too.
        """
        since, before = self.variants_sent
        self.variants = VariantCache(capacity, names)
        for name in (*before, *since):
            self.variants.use(name)
        self.variants_sent = ([], since)

    def report(self, pending_tokens: int) -> None:
        """Record how many prompt tokens the replica still has to compute, as it reports.

        The report may describe a state from up to two reporting intervals ago, so it is compared
        with the maximum of `pending_tokens` in this time. If the replica reports more tokens, the
        additional ones belong to requests of routers whose messages do not arrive here.
        """
        unknown_tokens = max(0, pending_tokens - max(self.peaks))
        self.unknown_s = self._seconds(unknown_tokens) if unknown_tokens else 0.0
        self.peaks = (self.pending_tokens, self.peaks[0])

    def record_answer(self, tokens: int) -> None:
        """Record the length of an answer."""
        weight = MEAN_SHARE if self.answer_tokens else 1.0
        self.answer_tokens += weight * (tokens - self.answer_tokens)

    def _seconds(self, tokens: int) -> float:
        """Return the seconds to compute so many tokens, at the mean time of recent tokens."""
        if not self.mean_tokens:
            return self.model.seconds(0, tokens)
        return tokens * self.mean_prefill_s / self.mean_tokens

    def first_token(self, request_id: str, now_s: float) -> None:
        """Record a request's first token, and learn the replica's speed from its prefill time."""
        sent = self.waiting.get(request_id)
        if sent is None:
            return
        knows_all = not self.unknown_s  # unknown requests would make the measured time too long
        self.finish_prefill(request_id, now_s, learn=knows_all and not sent.loads_first)
        self.reloads.end(request_id)
        self.pending_tokens -= sent.new_tokens
        self.prefilled_s += sent.prefill_s
        self._count_decoding(request_id, sent.prompt_tokens)

    def finish(self, request_id: str) -> None:
        """Record that a request has ended: it was answered, has failed or was cancelled."""
        self.kv.remove(request_id)
        if sent := self.leave(request_id):
            self.reloads.end(request_id)
            self.pending_tokens -= sent.new_tokens
        self._count_decoding(request_id, 0)

    def late_s(self, now_s: float) -> float:
        """Return how long ago the oldest waiting prompt should have got its first token."""
        if not self.waiting:
            return 0.0
        return max(0.0, now_s - self.busy_since_s - self.speed.slowness * self.head_s)

    def stalled_s(self, now_s: float, busy_s: float) -> float:
        """Return for how long the engine has started none of the prompts in its queue.

        A queue is the sign that running requests hold the KV cache or all places in the batch: a
        prompt that is late without a queue is being computed.

        Args:
            now_s: the current time.
            busy_s: Scale.busy_s; prompts that are late by less are no sign of anything.
        """
        if not self.engine_waiting:
            return 0.0
        late_s = self.late_s(now_s)
        return late_s if late_s > busy_s else 0.0

    @property
    def held_share(self) -> float:
        """Return the tokens of requests that were sent there, as a share of its KV cache.

        It is above 1 if they do not fit, and 0 if the capacity is unknown.
        """
        if not self.capacity_tokens:
            return 0.0
        return max(self.kv.tokens, self.held_tokens) / self.capacity_tokens

    @property
    def is_busy(self) -> bool:
        """Return whether the replica has an unanswered request."""
        return bool(self.waiting or self.decoding)

    @property
    def unanswered(self) -> int:
        """Return the number of unanswered requests."""
        return len(self.waiting) + len(self.decoding)

    def _start_s(self) -> float:
        """Return the earliest possible start of the prompt that has just got its first token.

        Prompts that wait for copies from slower tiers delay no other prompt, so they do not count.
        """
        sent_s = (sent.sent_s for sent in self.waiting.values() if not sent.waits_for_copies)
        return max(next(sent_s), self.last_first_token_s)

    def _count_decoding(self, request_id: str, tokens: int) -> None:
        """Set the context tokens of a decoding request; 0 means that it does not decode now."""
        self.decoding_tokens += tokens - self.decoding.pop(request_id, 0)
        if tokens:
            self.decoding[request_id] = tokens
        # Number of prompt tokens that take as much time as the decoding requests in a step.
        equal_tokens = DECODE_REQUEST * self.step_tokens * len(self.decoding)
        equal_tokens += DECODE_TOKEN * self.decoding_tokens
        self.decode_step_s = equal_tokens / self.model.tokens_per_s


def new_replica_load(
    model: PrefillModel, step_tokens: int, fleet: Collection[ReplicaLoad], *, step_s: float = 0.0
) -> ReplicaLoad:
    """Return the load of a replica without requests.

    Its slowness starts with the mean of the fleet. A start with 1 would trust the speed that the
    replica reports. If that is too high, the replica would get too many requests at first.

    Args:
        model: the prefill speed that the replica reports.
        step_tokens: the most tokens that the engine computes in one step.
        fleet: the loads of the other replicas.
        step_s: assumed seconds of one engine step, until answers show the real value.
    """
    slowness = _fleet_slowness([load.speed for load in fleet]) if fleet else 1.0
    typical_s = TYPICAL_STEPS * model.seconds(0, step_tokens)
    speed = PrefillSpeed(prior=slowness, typical_s=typical_s, step_s=step_s)
    return ReplicaLoad(model, step_tokens, speed=speed)


def learned_slowness(loads: Sequence[ReplicaLoad]) -> list[tuple[float, float]]:
    """Return each replica's slowness, and the slowness that it would have without a fault.

    A value near the median is smoothed, since a few observations say little about one replica:

    - A busy replica gets the average of its own value and the mean of all values near the median.
      Its own value counts, since running answers slow some replicas down more than others.
    - An idle replica gets that mean. Otherwise, the replica that seems a little faster would get
      all requests of an idle fleet.

    A value far from the median is not smoothed: the replica has a fault. Without it, the replica
    would have the mean.
    """
    if not loads:
        return []
    speeds = [load.speed for load in loads]
    fleet = _fleet_slowness(speeds)
    for speed in speeds:
        if speed.is_new and speed.prior != fleet:
            speed.set_prior(fleet)
    learned = [speed.slowness for speed in speeds]
    median = sorted(learned)[len(learned) // 2]
    near = [abs(slowness - median) <= NEAR * median for slowness in learned]
    mean = _fleet_slowness(list(compress(speeds, near)))
    pairs = []
    for load, slowness, is_near in zip(loads, learned, near, strict=True):
        if is_near:
            slowness = healthy = (slowness + mean) / 2 if load.is_busy else mean
        else:
            healthy = mean
        pairs.append((slowness, healthy))
    return pairs


def slow_replicas(loads: Mapping[str, ReplicaLoad]) -> dict[str, float]:
    """Return the replicas that take at least SLOW times as long as the others: id -> factor."""
    learned = zip(loads, learned_slowness([*loads.values()]), strict=True)
    ratios = {replica_id: slowness / healthy for replica_id, (slowness, healthy) in learned}
    return {replica_id: ratio for replica_id, ratio in ratios.items() if ratio >= SLOW}


def _fleet_slowness(speeds: Sequence[Speed]) -> float:
    """Return the mean observed slowness, or the mean prior if nothing was observed yet."""
    predicted_s = sum([speed.predicted_s for speed in speeds])
    if not predicted_s:
        return sum([speed.prior for speed in speeds]) / len(speeds)
    return max(MIN_SLOWNESS, sum([speed.observed_s for speed in speeds]) / predicted_s)
