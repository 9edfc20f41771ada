"""One request at one replica: its placement, the chunks of its answer, and its outcome."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from kvroute.blocks.fingerprint import Fingerprint, MediaSpan
from kvroute.blocks.tiers import DISK, PEER, Tier
from kvroute.contract.generation import Chunk, TraceContext
from kvroute.contract.keep import RetentionHint, SessionTurn
from kvroute.contract.messages import Dispatch
from kvroute.contract.priority import Priority
from kvroute.features.gate import UNCOUNTED, Entry
from kvroute.features.placing_feature import NO_FEATURES, PlacingFeatures
from kvroute.router.index.boundaries import Boundaries
from kvroute.router.index.mirror import Mirror
from kvroute.router.placement.ledger import NOTHING, Ledger, account
from kvroute.router.placement.load import ReplicaLoad
from kvroute.router.placement.policy import Candidate, Term
from kvroute.router.placement.scale import Scale
from kvroute.router.placement.waits import (
    DEFAULT_URGENCY,
    NO_WAIT,
    TakenBack,
    Urgency,
    Wait,
)
from kvroute.router.sessions.breaks import Break
from kvroute.router.sessions.turns import NO_HINTS, SessionHints

MIN_HOLDER_SHARE = 0.25  # a replica holds a prompt if it has cached at least this share of it


class Placement(Struct, frozen=True):
    """The ranking of the replicas for a prompt, and the facts behind it."""

    ranking: tuple[Candidate, ...]
    chain: tuple[Fingerprint, ...]  # the prompt's reusable blocks
    best_hit_blocks: int  # blocks of the longest hit on any replica
    prompt_tokens: int  # tokens of the prompt
    block_size: int  # tokens of a block
    busy_s: float = 1.0  # the fleet's unit of time, see Scale.busy_s
    forks: float = 0.0  # earlier prompts that diverged from this one at the end of the longest hit
    pressure: float = 0.0  # cache pressure, see pressure.py
    variant: str = ""  # the variant of the model; see Scope
    known_blocks: int = 0  # leading blocks that any replica has cached now or had cached before
    # Leading blocks that any replica has now in its first cache group, even if the blocks of other
    # groups are missing (index/boundaries.py).
    partial_blocks: int = 0
    shared_tokens: int = 0  # leading tokens that all namespaces share

    def candidate(self, replica_id: str) -> Candidate:
        """Return the replica's candidate. If it was not ranked, return one without hits."""
        for candidate in self.ranking:
            if candidate.replica_id == replica_id:
                return candidate
        return Candidate(replica_id, hit_blocks=0, backlog_s=0.0, own_s=0.0)

    @property
    def known_prefix(self) -> tuple[Fingerprint, ...]:
        """Return the fingerprints of the longest hit on any replica."""
        return self.chain[: self.best_hit_blocks]

    @property
    def holder_id(self) -> str:
        """Return the id of a replica with the longest hit.

        It is empty if even the longest hit is less than MIN_HOLDER_SHARE of the prompt.
        """
        if self.reusable_tokens < MIN_HOLDER_SHARE * self.prompt_tokens:
            return ""
        return max(self.ranking, key=lambda candidate: candidate.hit_blocks).replica_id

    @property
    def reusable_tokens(self) -> int:
        return self.best_hit_blocks * self.block_size

    @property
    def new_tokens(self) -> int:
        """Return the number of tokens that no replica has cached."""
        return self.prompt_tokens - self.reusable_tokens

    @property
    def known_tokens(self) -> int:
        return self.known_blocks * self.block_size

    @property
    def partial_tokens(self) -> int:
        return self.partial_blocks * self.block_size

    @property
    def evicted_tokens(self) -> int:
        """Return the number of tokens that some replica had cached before and none has now."""
        return max(0, self.known_tokens - max(self.reusable_tokens, self.partial_tokens))

    def expected_tokens(self, replica_id: str) -> int:
        return self.candidate(replica_id).hit_blocks * self.block_size

    def predicted_ttft_s(self, replica_id: str) -> float:
        return self.candidate(replica_id).ttft_s


class RequestContext(Struct, frozen=True):
    """What the router knows about a client's call. All prompts of a call share it."""

    ready_s: float = 0.0  # time at which the prompts were rendered, on the clock of Attempt.sent_s
    request_id: str = ""  # the id that the client gets; a dispatch adds a suffix
    choices: int = 1  # number of choices for each prompt
    prompts: int = 1  # number of prompts in the call
    namespace: str = ""  # namespace of the blocks; empty: blocks are shared with all requests
    entry: Entry = UNCOUNTED  # the call at the gate, which counts what it uses
    variant: str = ""  # the variant of the model to use; see Scope
    kept_tokens: int = 0  # leading tokens that replicas have to keep in their caches
    broken: Break | None = None  # first change from the chat's earlier prompt; None: no change
    is_resumed: bool = False  # true: a lost replica has generated the first part of the response
    # Images, videos and sounds in the prompt; calls with several prompts have none.
    media: tuple[MediaSpan, ...] = ()
    urgency: Urgency = DEFAULT_URGENCY  # priority and share in the queue, and limits of the wait
    wait: Wait = NO_WAIT  # this prompt's wait in the router
    is_in_lane: bool = False  # whether this prompt gives way to others at its replica
    hints: SessionHints = NO_HINTS  # what the client has declared about the session
    turn: SessionTurn | None = None  # its turn in the session; None: it was not placed yet
    keep: RetentionHint | None = None  # see GenerateRequest
    evicted_why: str = "usual"  # why blocks of it were evicted, if some were; EVICTION_REASONS
    is_opaque: bool = False  # true: the prompt's tokens are unknown; their number is an estimate
    # Called with the id of a rank before the request is sent there, and raises what an attempt to
    # send raises; None: nothing comes first.
    before_send: Callable[[str], Awaitable[None]] | None = None


# How an attempt ends:
# ok         all choices have finished
# cancelled  the client has disconnected, or the request was cancelled otherwise
# refused    the engine cannot run the request, or all replicas are full
# failed     the replica was lost; the request is sent to another one if possible
# moved      another replica got it: this one was full, had left, or did not start it
Outcome = Literal["ok", "cancelled", "refused", "failed", "moved"]


class RequestObserver:
    """Receives the events of this router's requests. This base class ignores all of them."""

    def placed(self, placement: Placement, decision_s: float) -> None:
        """Observe a placement, which took `decision_s` seconds."""

    def waited(self, wait: Wait) -> None:
        """Observe that a request has left the router's queue and will be sent to a replica."""

    def rejected(self, priority: Priority, refusal: str) -> None:
        """Observe that the router refuses a request: its wait is, or will be, too long."""

    def refused(self, error: Exception) -> None:
        """Observe an error that a client gets instead of a response."""

    def taken_back(self, why: TakenBack) -> None:
        """Observe that a request is taken back from a replica whose engine has not started it."""

    def sent(self, attempt: "Attempt") -> None:
        """Observe that a request is sent to a replica."""

    def first_token(self, attempt: "Attempt") -> None:
        """Observe that the first token has arrived."""

    def next_chunk(self, attempt: "Attempt", gap_s: float) -> None:
        """Observe a chunk that arrived `gap_s` seconds after the previous one."""

    def ended(self, attempt: "Attempt") -> None:
        """Observe that an attempt has ended."""


NO_OBSERVER = RequestObserver()


@dataclass(slots=True)
class Attempt:
    """One request at one replica, from the dispatch to the end."""

    mirror: Mirror  # the router's copy of the index of cached blocks
    load: ReplicaLoad  # the replica's load, which includes this attempt
    dispatch: Dispatch
    capacity_blocks: int  # size of the replica's prefix cache in blocks; 0: it has none
    sent_s: float  # time at which the request was sent
    context: RequestContext
    scale: Scale  # the fleet's mean times; the time of this answer is added at its end
    placement: Placement | None = None  # None: another router has sent the request
    observer: RequestObserver = NO_OBSERVER
    # Where hits can end in the replica's cache; None: after each block, as the engine has only one
    # cache group.
    boundaries: Boundaries | None = None
    trace: TraceContext | None = None  # the attempt's span, if an observer records spans
    features: PlacingFeatures = NO_FEATURES  # they observe the attempt
    terms: Sequence[Term] = ()  # the terms of features in the cost of its replica
    is_complete: bool = False
    output_tokens: int = 0  # tokens of all choices so far
    first_tokens: int = 0  # output tokens in the first chunk
    # Prompt tokens that the engine found in its cache. The first chunk has this number.
    cached_tokens: int | None = None
    first_token_s: float | None = None  # time at which the first token arrived
    last_chunk_s: float | None = None  # time at which the latest chunk arrived
    outcome: Outcome | None = None  # None: the attempt is in flight

    @property
    def request_id(self) -> str:
        return self.dispatch.request_id

    @property
    def replica_id(self) -> str:
        return self.dispatch.replica_id

    @property
    def token_gap_s(self) -> float | None:
        """Return the mean time between two tokens of a complete answer, in seconds.

        It is None for other answers, for those of one chunk, and for those of several choices.
        """
        later_tokens = self.output_tokens - self.first_tokens
        is_counted = self.outcome == "ok" and self.context.choices == 1 and later_tokens > 0
        if not is_counted or self.first_token_s is None or self.last_chunk_s is None:
            return None
        return (self.last_chunk_s - self.first_token_s) / later_tokens

    def receive(self, chunk: Chunk, now_s: float) -> None:
        """Record a chunk from the replica."""
        self.output_tokens += len(chunk.token_ids)
        self.is_complete = chunk.is_last
        if self.terms:
            for answering in self.features.answering:
                answering(self, chunk, now_s)
        if self.last_chunk_s is None:
            self.first_tokens = self.output_tokens
            self.cached_tokens = chunk.cached_tokens
            if chunk.http is None or not chunk.http.is_whole:
                self.first_token(now_s)
        else:
            self.observer.next_chunk(self, now_s - self.last_chunk_s)
        self.last_chunk_s = now_s

    def first_token(self, now_s: float) -> None:
        """Record that the first token has arrived."""
        self.first_token_s = now_s
        self.load.first_token(self.request_id, now_s)
        self.observer.first_token(self)

    def end(self, outcome: Outcome | None = None) -> None:
        """End the attempt. A second call has no effect.

        Args:
            outcome: the outcome; None: "ok" if all choices have finished, else "cancelled".
        """
        if self.outcome is not None:
            return
        self.outcome = outcome or ("ok" if self.is_complete else "cancelled")
        self.load.finish(self.request_id)
        self._learn_step()
        if self.is_over and self.last_chunk_s is not None and self.capacity_blocks:
            self.mirror.record_computed(
                self.replica_id, self.dispatch.expected.blocks, self.last_chunk_s
            )
        else:
            self.mirror.unexpect(self.replica_id, self.dispatch.expected.blocks)
        if self.placement and self.first_token_s is not None and self.capacity_blocks:
            self._infer(self.placement.chain)
        for attempt_ended in self.features.attempt_ended:
            attempt_ended(self)
        self._learn_answer()
        self.observer.ended(self)

    def end_elsewhere(self, now_s: float, *, is_over: bool) -> None:
        """End an attempt of another router after that router has published the end.

        Args:
            is_over: whether the request ended with this attempt.
        """
        self.last_chunk_s = now_s
        self.end(None if is_over else "moved")

    def _learn_step(self) -> None:
        """Update the engine's step time with the mean time between two tokens of the answer."""
        later_tokens = self.output_tokens - self.first_tokens
        if later_tokens > 0 and self.first_token_s is not None and self.last_chunk_s is not None:
            self.load.speed.step((self.last_chunk_s - self.first_token_s) / later_tokens)

    def _learn_answer(self) -> None:
        """Update the fleet's mean answer time, and the mean length of answers.

        The times of batch requests say nothing about others.
        """
        if self.output_tokens:
            self.load.record_answer(self.output_tokens)
        if self.dispatch.is_batch:
            return
        if self.first_token_s is not None and self.last_chunk_s is not None:
            self.scale.record_answer(self.last_chunk_s - self.first_token_s)

    @property
    def is_over(self) -> bool:
        """Return whether the replica has answered the request, or it was cancelled.

        The result is False while the request is in flight, and for all other outcomes.
        """
        return self.outcome in ("ok", "cancelled")

    @property
    def end_s(self) -> float:
        """Return the time of the latest event so far."""
        return self.last_chunk_s or self.first_token_s or self.sent_s

    def _infer(self, chain: Sequence[Fingerprint]) -> None:
        """Mark the prompt's blocks in the mirror as probably cached by the replica.

        The mirror counts fingerprints. With several cache groups, an engine may publish more or
        fewer of them than the prompt has blocks, so the capacity is converted.
        """
        added = self.boundaries.added(chain, 0) if self.boundaries else chain
        capacity = self.capacity_blocks * len(added) // max(1, len(chain))
        self.mirror.infer(self.replica_id, added, capacity_blocks=capacity)

    @property
    def reloaded_tokens(self) -> dict[Tier, int]:
        """Return how many prompt tokens were copied back from each slower tier.

        These are the tokens that the router expected in the tier and the engine found cached.
        """
        if self.placement is None or self.cached_tokens is None:
            return {}
        candidate, size = self.placement.candidate(self.replica_id), self.placement.block_size
        begin, reloaded = candidate.gpu_blocks * size, dict[Tier, int]()
        for tier, blocks in candidate.reloads:
            end = begin + blocks * size
            if tokens := max(0, min(self.cached_tokens, end) - begin):
                reloaded[tier] = tokens
            begin = end
        return reloaded

    @property
    def saved_s(self) -> dict[Tier, float]:
        """Return the seconds that each slower tier saved.

        This is the time to compute the tokens that were copied back, minus the time of the copies.
        """
        if self.placement is None or not (reloaded := self.reloaded_tokens):
            return {}
        candidate = self.placement.candidate(self.replica_id)
        begin, saved_s = candidate.gpu_blocks * self.placement.block_size, dict[Tier, float]()
        slower = [tier for tier in reloaded if tier != PEER]
        for tier, tokens in reloaded.items():
            wait_s = candidate.terms_wait_s if tier == PEER else candidate.reload_s / len(slower)
            computed_s = self.load.computing_s(begin, begin + tokens)
            saved_s[tier] = max(0.0, computed_s - wait_s)
            begin += tokens
        return saved_s

    def ledger(self) -> Ledger | None:
        """Return how many prompt tokens were cached or computed, and for which causes (ledger.py).

        The result is None before the first chunk.
        """
        if self.placement is None or self.cached_tokens is None:
            return None
        reloaded = self.reloaded_tokens
        return account(
            self.placement.prompt_tokens,
            cacheable=len(self.placement.chain) * self.placement.block_size,
            reusable=self.placement.reusable_tokens,
            expected=self.placement.expected_tokens(self.replica_id),
            delivered=self.cached_tokens,
            kept=max(self.context.kept_tokens, self.placement.shared_tokens),
            partial=self.placement.partial_tokens,
            known=self.placement.known_tokens,
            broken=self.context.broken.lost if self.context.broken else NOTHING,
            is_salted=bool(self.context.namespace),
            pulled=reloaded.get(PEER, 0),
            disk=reloaded.get(DISK, 0),
        )
