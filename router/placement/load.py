"""A replica's unanswered requests as this router knows them, and its observed speed.

This is bookkeeping only: the caller passes the time, in seconds of any monotonic clock.
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

NEAR = 0.25  # share of the median slowness by which replicas differ without being told apart
SLOW = 1.5  # replicas that take so many times as long as the others are reported as slow
TYPICAL_STEPS = 2.0  # full steps that a prompt is expected to take before any was seen
MEAN_SHARE = 0.05  # weight of the latest request in the mean prefill
UNLIMITED = 1 << 30  # adapters; used until a replica has reported its capacity
# What decoding adds to a step. A GPU's memory and its arithmetic grow together: for 8B and 70B
# models on L4, A100, H100 and H200, a token of context adds 3e-4 to 13e-4 prefill times of a token.
DECODE_REQUEST = 6e-5  # time of each decoding request, in prefill times of a full step
DECODE_TOKEN = 7e-4  # time of each token of its context, in prefill times of a token


@dataclass(slots=True)
class Sent:
    """A request that waits for its first token."""

    prefill_s: float  # prefill time that the speed model predicts
    new_tokens: int
    prompt_tokens: int
    sent_s: float
    lora: str = ""  # the request's LoRA adapter; empty: none
    loads_first: bool = False  # the adapter or blocks: its first token is no sample of the speed
    reload_s: float = 0.0  # seconds until slower tiers' blocks are back; unknown for other routers
    prefix: Fingerprint | None = None  # last block of its prompt that some replica had

    @property
    def ready_s(self) -> float:
        """From when on the engine can compute it."""
        return self.sent_s + self.reload_s

    @property
    def leaves_engine(self) -> bool:
        """While it reloads blocks, the engine computes others; loading an adapter stops it."""
        return self.reload_s > 0 or (self.loads_first and not self.lora)


@dataclass(slots=True)
class ReplicaLoad(PrefillQueue[Sent]):
    model: PrefillModel
    step_tokens: int = 8192  # most tokens that the engine computes in one step
    capacity_tokens: int = 0  # capacity of its KV cache; 0: unknown
    decoding: dict[str, int] = field(default_factory=dict)  # request id -> prompt tokens
    # Derived from the requests and updated with each one, since every decision reads them all.
    pending_tokens: int = 0
    decoding_tokens: int = 0
    decode_step_s: float = 0.0  # seconds that its decoding requests add to each step
    mean_prefill_s: float = 0.0  # mean prefill time of recent requests
    prefilled_s: float = 0.0  # predicted prefill of all requests that have had their first token
    loras: AdapterCache = field(
        default_factory=lambda: AdapterCache(UNLIMITED)
    )  # loaded, as we know
    loras_sent: tuple[list[str], list[str]] = field(
        default_factory=lambda: ([], [])
    )  # since the last report, and between the two last reports
    # The most pending tokens that we knew: since the last report, and between the two last ones.
    peaks: tuple[int, int] = (0, 0)
    mean_tokens: float = 0.0  # mean tokens to compute of recent requests
    reloads: Reloads = field(default_factory=Reloads)
    kv: KvUse = field(default_factory=KvUse)  # the part of the KV cache that its requests hold

    def send(self, request_id: str, sent: Sent) -> None:
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

        The report is at most as old as the last report but one. Adapters of requests that were sent
        since then count as loaded, too.
        """
        since, before = self.loras_sent
        self.loras = AdapterCache(capacity, names)
        for name in (*before, *since):
            self.loras.use(name)
        self.loras_sent = ([], since)

    def report(self, pending_tokens: int) -> None:
        """Record the uncached prompt tokens of the replica's requests without a first token.

        The report is at most as old as the last report but one. Tokens above the most that this
        router knew of since then belong to routers that it does not hear from.
        """
        unknown = max(0, pending_tokens - max(self.peaks))
        self.unknown_s = self._seconds(unknown) if unknown else 0.0
        self.peaks = (self.pending_tokens, self.peaks[0])

    def _seconds(self, tokens: int) -> float:
        """To compute tokens of prompts like those that we know."""
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
        """Record that the replica no longer works on it: answered, failed or cancelled."""
        self.kv.remove(request_id)
        if sent := self.leave(request_id):
            self.reloads.end(request_id)
            self.pending_tokens -= sent.new_tokens
        self._count_decoding(request_id, 0)

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.decoding)

    @property
    def unanswered(self) -> int:
        return len(self.waiting) + len(self.decoding)

    def _start_s(self) -> float:
        """Return when the engine began to compute the first prompt that waits for its token.

        Blocks that are being copied from slower tiers delay no other prompt.
        """
        begun_s = (each.sent_s for each in self.waiting.values() if not each.leaves_engine)
        return max(next(begun_s), self.last_first_token_s)

    def _count_decoding(self, request_id: str, tokens: int) -> None:
        """Set the request's context tokens; 0: it no longer decodes."""
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

    It starts with the slowness that the other replicas have relative to their reported speeds. With
    its own report alone it would attract more requests than it can take.
    """
    slowness = _fleet_slowness([load.speed for load in fleet]) if fleet else 1.0
    typical_s = TYPICAL_STEPS * model.seconds(0, step_tokens)
    speed = PrefillSpeed(prior=slowness, typical_s=typical_s, step_s=step_s)
    return ReplicaLoad(model, step_tokens, speed=speed)


def learned_slowness(loads: Sequence[ReplicaLoad]) -> list[tuple[float, float]]:
    """Return each replica's slowness, and its slowness without faults of its own.

    A few observations say little about one replica. Those near the median get the middle of their
    own value and the mean while they are busy: answers take more of their time on some. While idle
    they get the mean: else the one that seems a little faster would get all requests of an idle
    fleet. A value far from the median is real; without its fault such a replica is like the mean.
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
    found = []
    for load, slowness, is_near in zip(loads, own, near, strict=True):
        if is_near:
            slowness = healthy = (slowness + mean) / 2 if load.is_busy else mean
        else:
            healthy = mean
        found.append((slowness, healthy))
    return found


def slow_replicas(loads: Mapping[str, ReplicaLoad]) -> dict[str, float]:
    """Return the replicas at least SLOW times as slow as the others: id -> how many times."""
    learned = zip(loads, learned_slowness([*loads.values()]), strict=True)
    ratios = {replica_id: slowness / healthy for replica_id, (slowness, healthy) in learned}
    return {replica_id: ratio for replica_id, ratio in ratios.items() if ratio >= SLOW}


def _fleet_slowness(speeds: Sequence[Speed]) -> float:
    """Return the mean slowness, as observed; as assumed before anything was."""
    predicted_s = sum([speed.predicted_s for speed in speeds])
    if not predicted_s:
        return sum([speed.prior for speed in speeds]) / len(speeds)
    return max(MIN_SLOWNESS, sum([speed.observed_s for speed in speeds]) / predicted_s)
