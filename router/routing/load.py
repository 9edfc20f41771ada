"""What this router sent to a replica and saw not yet answered, and how fast the replica proved.

Pure bookkeeping: the caller passes the time, in seconds of any steady clock.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from replica.adapters import Residents
from replica.speed import PRIOR_S, Speed

MEAN_SHARE = 0.05  # of the latest request in the mean prefill
RECENT_S = 60.0  # decay of the tokens computed lately
UNLIMITED = 1 << 30  # adapters, where a replica has not said for how many it has room
DECODE_REQUEST_S = 20e-6  # what one decoding request adds to a step
DECODE_TOKEN_S = 27e-9  # what each token of its context adds: KV read once a step


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Seconds of prefill: linear in the tokens, plus attention to all tokens before them."""

    tokens_per_s: float  # at the start of a prompt
    attention_tokens: float  # context length at which a token costs twice as much

    def seconds(self, start: int, end: int) -> float:
        """To compute the tokens [start, end) of a prompt."""
        attention = (end * end - start * start) / (2.0 * self.attention_tokens)
        return (end - start + attention) / self.tokens_per_s


@lru_cache
def prefill_model(tokens_per_s: float, attention_tokens: float) -> PrefillModel:
    """One object for replicas that are alike, so that a decision sees it at a glance."""
    return PrefillModel(tokens_per_s, attention_tokens)


@dataclass(slots=True)
class Sent:
    """A request on its way to its first token."""

    prefill_s: float  # as the model predicts it
    new_tokens: int
    prompt_tokens: int
    sent_s: float
    lora: str = ""  # LoRA adapter that it is for
    loads_lora: bool = False  # first, which is in prefill_s, and teaches nothing of the speed


@dataclass(slots=True)
class ReplicaLoad:
    model: PrefillModel
    waiting: dict[str, Sent] = field(default_factory=dict)  # no first token yet, oldest first
    decoding: dict[str, int] = field(default_factory=dict)  # request id -> prompt tokens
    speed: Speed = field(default_factory=Speed)  # as the first tokens seen taught it
    last_first_token_s: float = -math.inf
    # What follows from the above, kept as requests come and go: every decision reads all replicas'.
    waiting_s: float = 0.0
    head_s: float = 0.0  # of the oldest waiting request's prefill
    busy_since_s: float = -math.inf  # when that can have begun; not before the last one's end
    pending_tokens: int = 0
    decoding_tokens: int = 0
    decode_step_s: float = 0.0  # what the requests decoding there add to each step
    recent_tokens: float = 0.0  # as of recent_at_s
    recent_at_s: float = 0.0
    mean_prefill_s: float = 0.0  # of requests sent lately
    unheard_s: float = 0.0  # prefill waiting there that nobody told us of, guessed
    loras: Residents = field(default_factory=lambda: Residents(UNLIMITED))  # as we know
    loras_sent: tuple[list[str], list[str]] = field(
        default_factory=lambda: ([], [])
    )  # since the last report, and before
    peaks: tuple[int, int] = (0, 0)  # the most that waited, as we know: since last report, before

    def send(self, request_id: str, sent: Sent) -> None:
        self.waiting[request_id] = sent
        if sent.lora:
            self.loras.use(sent.lora)
            self.loras_sent[0].append(sent.lora)
        self._find_head()
        self.waiting_s += sent.prefill_s
        self.pending_tokens += sent.new_tokens
        self.recent_tokens = self.recent(sent.sent_s) + sent.new_tokens
        self.recent_at_s = sent.sent_s
        self.mean_prefill_s += MEAN_SHARE * (sent.prefill_s - self.mean_prefill_s)
        self.peaks = (max(self.peaks[0], len(self.waiting)), self.peaks[1])

    def report_loras(self, names: Iterable[str], capacity: int) -> None:
        """The replica says which adapters it has loaded, as of some time since the last report but
        one: those that were sent there since are taken for loaded as well."""
        since, before = self.loras_sent
        self.loras = Residents(capacity, names)
        for name in (*before, *since):
            self.loras.use(name)
        self.loras_sent = ([], since)

    def report(self, waiting: int) -> None:
        """The replica says how many requests wait there, as of some time since the last report but
        one: what it has above the most we knew of since then is somebody else's, and counts as
        the mean of those we know."""
        self.unheard_s = self.mean_prefill_s * max(0, waiting - max(self.peaks))
        self.peaks = (len(self.waiting), self.peaks[0])

    def first_token(self, request_id: str, now_s: float) -> None:
        """The request's prefill is over: its time teaches the replica's speed."""
        sent = self.waiting.get(request_id)
        if sent is None:
            return
        if not sent.loads_lora:
            # Since the oldest one's turn, whichever first token comes first: those of one step
            # arrive in any order, the other routers' later than one's own.
            self.speed.learn(sent.prefill_s, now_s - self.busy_since_s)
        self.last_first_token_s = now_s
        self._leave_waiting(request_id)
        self._count_decoding(request_id, sent.prompt_tokens)

    def finish(self, request_id: str) -> None:
        """Answered, failed or cancelled: the replica no longer works on it."""
        self._leave_waiting(request_id)
        self._count_decoding(request_id, 0)

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.decoding)

    @property
    def unanswered(self) -> int:
        return len(self.waiting) + len(self.decoding)

    def recent(self, now_s: float) -> float:
        """Uncached prompt tokens sent there lately."""
        return self.recent_tokens * math.exp((self.recent_at_s - now_s) / RECENT_S)

    def backlog_s(self, slowness: float, now_s: float) -> float:
        """Seconds of prefill queued or running, less what the head has already had."""
        had_s = min(slowness * self.head_s, now_s - self.busy_since_s)
        return max(0.0, slowness * (self.waiting_s + self.unheard_s) - had_s)

    def _find_head(self) -> None:
        head = next(iter(self.waiting.values()))
        self.head_s = head.prefill_s
        self.busy_since_s = max(head.sent_s, self.last_first_token_s)

    def _leave_waiting(self, request_id: str) -> None:
        sent = self.waiting.pop(request_id, None)
        if sent is None:
            return
        self.pending_tokens -= sent.new_tokens
        if self.waiting:
            self._find_head()
            self.waiting_s -= sent.prefill_s
        else:  # an empty sum is exact: rounding does not pile up over days
            self.head_s = self.waiting_s = 0.0
            self.busy_since_s = -math.inf

    def _count_decoding(self, request_id: str, tokens: int) -> None:
        """From now on so many tokens of context; 0: it no longer decodes."""
        self.decoding_tokens += tokens - self.decoding.pop(request_id, 0)
        if tokens:
            self.decoding[request_id] = tokens
        self.decode_step_s = (
            DECODE_REQUEST_S * len(self.decoding) + DECODE_TOKEN_S * self.decoding_tokens
        )


def newcomer(model: PrefillModel, fleet: Collection[ReplicaLoad]) -> ReplicaLoad:
    """A replica that nothing was sent to yet: as slow as the others proved, beside what it says of
    itself. It would get more than it can take, were it believed."""
    slowness = _fleet_slowness([load.speed for load in fleet]) if fleet else 1.0
    return ReplicaLoad(model, speed=Speed(observed_s=slowness * PRIOR_S))


def learned_slowness(loads: Sequence[ReplicaLoad]) -> list[float]:
    """Each replica's slowness, drawn half-way to the fleet's where it is near the median.

    A few observations say little about one replica; one that is far off the median is off indeed.
    """
    if not loads:
        return []
    speeds = [load.speed for load in loads]
    own = [speed.slowness for speed in speeds]
    fleet = _fleet_slowness(speeds)
    median = sorted(own)[len(own) // 2]
    return [(c + fleet) / 2 if abs(c - median) <= 0.25 * median else c for c in own]


def _fleet_slowness(speeds: Sequence[Speed]) -> float:
    return sum([speed.observed_s for speed in speeds]) / sum([s.predicted_s for s in speeds])
