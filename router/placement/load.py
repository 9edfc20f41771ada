"""The load of one replica: its unanswered requests as this router knows them, and its speed.

This module has no clock: the caller passes the time, in seconds of any monotonic clock.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.adapters import AdapterCache
from kvroute.prefill.queue import PrefillQueue
from kvroute.prefill.speed import MIN_SLOWNESS, PrefillModel, PrefillSpeed, Speed
from kvroute.router.placement.kv_use import KvUse
from kvroute.router.placement.reloads import Reloads

# A replica whose slowness differs from the median by at most this share of it counts as normal.
NEAR = 0.25
SLOW = 1.5  # a replica that takes this many times as long as the others is reported as slow
TYPICAL_STEPS = 2.0  # prior for the length of a prompt, in full engine steps
MEAN_SHARE = 0.05  # weight of the newest request in the moving averages
UNLIMITED = 1 << 30  # capacity for adapters until a replica has reported its own
# Time that decoding adds to an engine step, relative to prefill. This ratio is similar on all GPUs,
# since memory bandwidth and compute grow together: for 8B and 70B models on L4, A100, H100 and
# H200, a token of context adds 3e-4 to 13e-4 times the prefill time of a token.
DECODE_REQUEST = 6e-5  # time of each decoding request, in prefill times of a full step
DECODE_TOKEN = 7e-4  # time of each token of its context, in prefill times of a token


@dataclass(slots=True)
class PendingRequest:
    """A request that waits for its first token."""

    prefill_s: float  # prefill time that the speed model predicts
    new_tokens: int  # tokens of the prompt that the replica has to compute
    prompt_tokens: int
    sent_s: float  # time at which it was sent
    lora: str = ""  # the request's LoRA adapter; empty: none
    # True if the replica first loads an adapter or copies blocks back. The time to the first token
    # then does not show the speed of prefill.
    loads_first: bool = False
    # Seconds until blocks are copied back from slower tiers; 0 for requests of other routers, which
    # do not publish it.
    reload_s: float = 0.0
    prefix: Fingerprint | None = None  # last block of its prompt that any replica had

    @property
    def ready_s(self) -> float:
        """Return the earliest time at which the engine can compute the prompt."""
        return self.sent_s + self.reload_s

    @property
    def leaves_engine(self) -> bool:
        """Return whether the engine computes other prompts before this one.

        It does while it copies blocks back. While it loads an adapter, it stops.
        """
        return self.reload_s > 0 or (self.loads_first and not self.lora)


@dataclass(slots=True)
class ReplicaLoad(PrefillQueue[PendingRequest]):
    """The requests that wait for their first token at one replica, and those that decode there."""

    model: PrefillModel  # the prefill speed that the replica reports
    step_tokens: int = 8192  # the most tokens that the engine computes in one step
    capacity_tokens: int = 0  # capacity of its KV cache; 0: unknown
    decoding: dict[str, int] = field(default_factory=dict)  # request id -> prompt tokens
    # Derived from the requests, and updated with each request, since every placement reads them.
    pending_tokens: int = 0  # prompt tokens that the replica still has to compute
    decoding_tokens: int = 0  # context tokens of all decoding requests
    decode_step_s: float = 0.0  # seconds that its decoding requests add to each step
    mean_prefill_s: float = 0.0  # moving average of the requests' prefill times
    prefilled_s: float = 0.0  # predicted prefill time of all requests that got their first token
    loras: AdapterCache = field(default_factory=lambda: AdapterCache(UNLIMITED))  # loaded adapters
    # Adapters of requests that were sent since the last report, and of those that were sent between
    # the last two reports.
    loras_sent: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    # Maximum of pending_tokens since the last report, and between the last two reports.
    peaks: tuple[int, int] = (0, 0)
    mean_tokens: float = 0.0  # moving average of the requests' new tokens
    reloads: Reloads = field(default_factory=Reloads)  # pending copies from slower tiers
    kv: KvUse = field(default_factory=KvUse)  # the part of the KV cache that requests hold

    def send(self, request_id: str, sent: PendingRequest) -> None:
        """Add a request that is sent to the replica."""
        self.join(request_id, sent)
        self.kv.add(
            request_id,
            new_tokens=sent.new_tokens,
            cached_tokens=sent.prompt_tokens - sent.new_tokens,
            prefix=sent.prefix,
        )
        if sent.reload_s:
            self.reloads.begin(request_id, sent.ready_s)
        if sent.lora:
            self.loras.use(sent.lora)
            self.loras_sent[0].append(sent.lora)
        self.pending_tokens += sent.new_tokens
        self.mean_prefill_s += MEAN_SHARE * (sent.prefill_s - self.mean_prefill_s)
        self.mean_tokens += MEAN_SHARE * (sent.new_tokens - self.mean_tokens)
        self.peaks = (max(self.peaks[0], self.pending_tokens), self.peaks[1])

    def report_loras(self, names: Iterable[str], capacity: int) -> None:
        """Record the adapters that the replica reports as loaded.

        The reported state may be as old as the arrival of the second-last report. So adapters of
        requests that were sent since then count as loaded, too.
        """
        since, before = self.loras_sent
        self.loras = AdapterCache(capacity, names)
        for name in (*before, *since):
            self.loras.use(name)
        self.loras_sent = ([], since)

    def report(self, pending_tokens: int) -> None:
        """Record how many prompt tokens the replica still has to compute, as it reports.

        The reported state may be as old as the arrival of the second-last report. If it has more
        tokens than the maximum that this router knew of since then, the surplus belongs to routers
        whose messages do not arrive here.
        """
        unknown_tokens = max(0, pending_tokens - max(self.peaks))
        self.unknown_s = self._seconds(unknown_tokens) if unknown_tokens else 0.0
        self.peaks = (self.pending_tokens, self.peaks[0])

    def _seconds(self, tokens: int) -> float:
        """Return the seconds to compute tokens of prompts that are like the recent ones."""
        if not self.mean_tokens:
            return self.model.seconds(0, tokens)
        return tokens * self.mean_prefill_s / self.mean_tokens

    def first_token(self, request_id: str, now_s: float) -> None:
        """Record the end of the request's prefill, and learn the replica's speed from its time."""
        sent = self.waiting.get(request_id)
        if sent is None:
            return
        is_alone = not self.unknown_s  # else its time was partly that of others
        self.finish_prefill(request_id, now_s, learn=is_alone and not sent.loads_first)
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

    @property
    def is_busy(self) -> bool:
        """Return whether the replica has an unanswered request."""
        return bool(self.waiting or self.decoding)

    @property
    def unanswered(self) -> int:
        """Return the number of unanswered requests."""
        return len(self.waiting) + len(self.decoding)

    def _start_s(self) -> float:
        """Return the time at which the engine started with the oldest prompt that it computes.

        Prompts that wait for copies from slower tiers do not count: they delay no other prompt.
        """
        sent_s = (sent.sent_s for sent in self.waiting.values() if not sent.leaves_engine)
        return max(next(sent_s), self.last_first_token_s)

    def _count_decoding(self, request_id: str, tokens: int) -> None:
        """Set the context tokens of a request that decodes; 0 if it no longer decodes."""
        self.decoding_tokens += tokens - self.decoding.pop(request_id, 0)
        if tokens:
            self.decoding[request_id] = tokens
        prefills = DECODE_REQUEST * self.step_tokens * len(self.decoding)
        prefills += DECODE_TOKEN * self.decoding_tokens
        self.decode_step_s = prefills / self.model.tokens_per_s


def new_replica_load(
    model: PrefillModel, step_tokens: int, fleet: Collection[ReplicaLoad], *, step_s: float = 0.0
) -> ReplicaLoad:
    """Return the load of a replica without requests.

    Its slowness starts with the mean of the fleet. If it started with 1, a replica that reports a
    speed that is too high would first get more requests than it can compute.

    Args:
        model: the prefill speed that the replica reports.
        step_tokens: the most tokens that the engine computes in one step.
        fleet: the loads of the other replicas.
        step_s: seconds of one engine step, until answers have shown them.
    """
    slowness = _fleet_slowness([load.speed for load in fleet]) if fleet else 1.0
    typical_s = TYPICAL_STEPS * model.seconds(0, step_tokens)
    speed = PrefillSpeed(prior=slowness, typical_s=typical_s, step_s=step_s)
    return ReplicaLoad(model, step_tokens, speed=speed)


def learned_slowness(loads: Sequence[ReplicaLoad]) -> list[tuple[float, float]]:
    """Return two values for each replica: its slowness, and the slowness that it has if healthy.

    A few observations say little about one replica, so values near the median are smoothed. A busy
    replica gets the average of its own value and the mean, since answers slow some replicas down
    more than others. An idle replica gets the mean: otherwise the one that seems a little faster
    would get all requests of an idle fleet. A value far from the median is real: the replica has a
    fault, and its healthy value is the mean.
    """
    if not loads:
        return []
    speeds = [load.speed for load in loads]
    fleet = _fleet_slowness(speeds)
    for speed in speeds:
        if speed.is_new and speed.prior != fleet:
            speed.set_prior(fleet)
    own = [speed.slowness for speed in speeds]
    median = sorted(own)[len(own) // 2]
    near = [abs(slowness - median) <= NEAR * median for slowness in own]
    mean = _fleet_slowness(list(compress(speeds, near)))
    pairs = []
    for load, slowness, is_near in zip(loads, own, near, strict=True):
        if is_near:
            slowness = healthy = (slowness + mean) / 2 if load.is_busy else mean
        else:
            healthy = mean
        pairs.append((slowness, healthy))
    return pairs


def slow_replicas(loads: Mapping[str, ReplicaLoad]) -> dict[str, float]:
    """Return the replicas that are at least SLOW times slower than the others: id -> factor."""
    learned = zip(loads, learned_slowness([*loads.values()]), strict=True)
    ratios = {replica_id: slowness / healthy for replica_id, (slowness, healthy) in learned}
    return {replica_id: ratio for replica_id, ratio in ratios.items() if ratio >= SLOW}


def _fleet_slowness(speeds: Sequence[Speed]) -> float:
    """Return the mean observed slowness, or the mean prior if nothing was observed yet."""
    predicted_s = sum([speed.predicted_s for speed in speeds])
    if not predicted_s:
        return sum([speed.prior for speed in speeds]) / len(speeds)
    return max(MIN_SLOWNESS, sum([speed.observed_s for speed in speeds]) / predicted_s)
