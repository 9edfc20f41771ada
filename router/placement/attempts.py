"""One request at one replica: why it was placed there, what it receives, how it ends."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from msgspec import Struct

from kvroute.blocks.fingerprint import Feature, Fingerprint
from kvroute.blocks.tiers import Tier
from kvroute.contract.generation import Chunk, TraceContext
from kvroute.contract.messages import Dispatch
from kvroute.contract.priority import Priority
from kvroute.router.admission.limits import Entry
from kvroute.router.admission.seats import Seats
from kvroute.router.admission.waits import DEFAULT_URGENCY, NO_WAIT, Refusal, Urgency, Wait
from kvroute.router.index.boundaries import Boundaries
from kvroute.router.index.mirror import Mirror
from kvroute.router.placement.ledger import NOTHING, Ledger, account
from kvroute.router.placement.load import ReplicaLoad
from kvroute.router.placement.policy import Candidate
from kvroute.router.placement.scale import Scale
from kvroute.router.sessions.breaks import Break
from kvroute.router.sessions.returns import NO_HINTS, EvictionReason, Retention, SessionHints

MUCH = 0.25  # least share of a prompt that a replica must have cached to be worth a wait


class Placement(Struct, frozen=True):
    """The ranking of the replicas for a prompt, and the facts on which it is based."""

    ranking: tuple[Candidate, ...]
    chain: tuple[Fingerprint, ...]  # the prompt's reusable blocks
    best_hit_blocks: int  # the longest hit on any replica
    prompt_tokens: int
    block_size: int
    busy_s: float = 1.0  # the fleet's unit of time, from its Scale
    forks: float = 0.0  # earlier prompts that diverged where the known part of this one ends
    pressure: float = 0.0  # cache pressure: see `kvroute.router.placement.pressure`
    lora: str = ""  # the request's LoRA adapter
    known_blocks: int = 0  # the longest part that any replica has now or had once
    partial_blocks: int = 0  # the longest part that any replica's first cache group has now
    shared_tokens: int = 0  # tokens at the beginning that all namespaces share

    def at(self, replica_id: str) -> Candidate:
        """Return the candidate with that id; without hits if the replica was not ranked."""
        for candidate in self.ranking:
            if candidate.replica_id == replica_id:
                return candidate
        return Candidate(replica_id, hit_blocks=0, backlog_s=0.0, own_s=0.0)

    @property
    def known_prefix(self) -> tuple[Fingerprint, ...]:
        """Return the fingerprints of the longest hit on any replica."""
        return self.chain[: self.best_hit_blocks]

    @property
    def home(self) -> str:
        """Return a replica with the longest hit.

        Empty: even the longest hit is less than the share MUCH of the prompt.
        """
        if self.reusable_tokens < MUCH * self.prompt_tokens:
            return ""
        return max(self.ranking, key=lambda candidate: candidate.hit_blocks).replica_id

    @property
    def reusable_tokens(self) -> int:
        return self.best_hit_blocks * self.block_size

    @property
    def new_tokens(self) -> int:
        """Return the tokens that even the best replica has to compute."""
        return self.prompt_tokens - self.reusable_tokens

    @property
    def known_tokens(self) -> int:
        return self.known_blocks * self.block_size

    @property
    def partial_tokens(self) -> int:
        return self.partial_blocks * self.block_size

    @property
    def evicted_tokens(self) -> int:
        """Return the tokens that some replica once had and none has now."""
        return max(0, self.known_tokens - max(self.reusable_tokens, self.partial_tokens))

    def expected_tokens(self, replica_id: str) -> int:
        return self.at(replica_id).hit_blocks * self.block_size

    def predicted_ttft_s(self, replica_id: str) -> float:
        return self.at(replica_id).ttft_s


class RequestContext(Struct, frozen=True):
    """What the router knows about a client's call and passes on with each of its prompts."""

    at_s: float = 0.0  # when its prompts were ready to be dispatched, on the attempts' clock
    request_id: str = ""  # id that the client knows; a dispatch's id is longer
    choices: int = 1  # number of choices for each prompt
    prompts: int = 1  # number of prompts in the call
    namespace: str = ""  # namespace of its blocks; empty: it shares blocks with all others
    tenant: str = ""  # tenant of its API key; empty: no keys are used
    entry: Entry | None = None  # counts the call in its tenant's limits; None: no limits
    lora: str = ""  # LoRA adapter to use; empty: the model itself
    named_tokens: int = 0  # tokens in the whole blocks of the named prefix that it starts with
    broken: Break | None = None  # where the prompt differs from the chat's earlier prompt
    is_resumed: bool = False  # true: a lost replica has generated the first part
    features: tuple[Feature, ...] = ()  # images and the like; calls with several prompts have none
    urgency: Urgency = DEFAULT_URGENCY
    sharer: str = ""  # unit of fair sharing; empty: none
    wait: Wait = NO_WAIT  # wait of this prompt in the router
    hints: SessionHints = NO_HINTS
    retention: Retention | None = None  # retention of this prompt, once it was placed
    # Called repeatedly while the request waits for a seat, to let its client know.
    still_waiting: Callable[[], Awaitable[None]] | None = None


# How an attempt ends. refused: the engine cannot run it, or no replica has room. failed: the
# replica was lost; the request is sent again if possible. moved: the replica was full or gone when
# the request arrived, and the request went to another one.
Outcome = Literal["ok", "cancelled", "refused", "failed", "moved"]


class RequestObserver:
    """Receives the events of this router's requests; the base class ignores them."""

    def placed(self, placement: Placement, decision_s: float) -> None:
        """Observe that a request's replicas were ranked, which took `decision_s`."""

    def waited(self, wait: Wait) -> None:
        """Observe that a request has left the queue and is sent to a replica."""

    def seated(self, waited_s: float) -> None:
        """Observe that a request gets a seat of its session after a wait."""

    def turned_away(self, priority: Priority, refusal: Refusal) -> None:
        """Observe that a request was refused: it waited too long, or would wait too long."""

    def sent(self, attempt: "Attempt") -> None: ...

    def first_token(self, attempt: "Attempt") -> None: ...

    def next_chunk(self, attempt: "Attempt", gap_s: float) -> None:
        """Observe a chunk that arrived `gap_s` after the previous one."""

    def ended(self, attempt: "Attempt") -> None: ...


class RequestObservers(RequestObserver):
    """Passes each event on to several observers."""

    def __init__(self, *observers: RequestObserver) -> None:
        self._observers = observers
        self._at_chunks = [*chain.from_iterable(map(_at_chunks, observers))]

    def placed(self, placement: Placement, decision_s: float) -> None:
        for observer in self._observers:
            observer.placed(placement, decision_s)

    def waited(self, wait: Wait) -> None:
        for observer in self._observers:
            observer.waited(wait)

    def seated(self, waited_s: float) -> None:
        for observer in self._observers:
            observer.seated(waited_s)

    def turned_away(self, priority: Priority, refusal: Refusal) -> None:
        for observer in self._observers:
            observer.turned_away(priority, refusal)

    def sent(self, attempt: "Attempt") -> None:
        for observer in self._observers:
            observer.sent(attempt)

    def first_token(self, attempt: "Attempt") -> None:
        for observer in self._observers:
            observer.first_token(attempt)

    def next_chunk(self, attempt: "Attempt", gap_s: float) -> None:
        for observe in self._at_chunks:
            observe(attempt, gap_s)

    def ended(self, attempt: "Attempt") -> None:
        for observer in self._observers:
            observer.ended(attempt)


def _at_chunks(observer: RequestObserver) -> list[Callable[["Attempt", float], None]]:
    """Return the observer's methods that are called for each chunk; often there are none."""
    if isinstance(observer, RequestObservers):
        return observer._at_chunks
    is_own = type(observer).next_chunk is not RequestObserver.next_chunk
    return [observer.next_chunk] if is_own else []


NO_OBSERVER = RequestObserver()


@dataclass(slots=True)
class Attempt:
    """One request at one replica, from the dispatch to its end, whatever the outcome."""

    mirror: Mirror
    load: ReplicaLoad
    dispatch: Dispatch
    capacity_blocks: int  # capacity of the replica's cache
    sent_s: float
    context: RequestContext
    scale: Scale  # learns how long the answer took
    placement: Placement | None = None  # why it went there; None: another router sent it
    observer: RequestObserver = NO_OBSERVER
    boundaries: Boundaries | None = None  # boundaries of an engine with several cache groups
    trace: TraceContext | None = None  # the attempt's span, if an observer keeps one
    seats: Seats[Any] | None = None  # seats that count this turn; None: the request is no turn
    is_complete: bool = False
    output_tokens: int = 0  # tokens of all choices
    first_tokens: int = 0  # output tokens in the first chunk
    cached_tokens: int | None = (
        None  # cached prompt tokens, reported by the engine in the first chunk
    )
    first_token_s: float | None = None
    last_chunk_s: float | None = None
    outcome: Outcome | None = None  # None: it is in flight

    @property
    def request_id(self) -> str:
        return self.dispatch.request_id

    @property
    def replica_id(self) -> str:
        return self.dispatch.replica_id

    def receive(self, chunk: Chunk, now_s: float) -> None:
        """Record a chunk from the replica."""
        self.output_tokens += len(chunk.token_ids)
        self.is_complete = chunk.is_last
        if self.last_chunk_s is None:
            self.first_tokens = self.output_tokens
            self.cached_tokens = chunk.cached_tokens
            self.first_token(now_s)
        else:
            self.observer.next_chunk(self, now_s - self.last_chunk_s)
        self.last_chunk_s = now_s

    def first_token(self, now_s: float) -> None:
        self.first_token_s = now_s
        self.load.first_token(self.request_id, now_s)
        self.observer.first_token(self)

    def end(self, outcome: Outcome | None = None) -> None:
        """End the attempt. A second call has no effect.

        Without an outcome it is "ok" if all choices have finished, else "cancelled".
        """
        if self.outcome is not None:
            return
        self.outcome = outcome or ("ok" if self.is_complete else "cancelled")
        self.load.finish(self.request_id)
        self._teach_step()
        if self.is_over and self.last_chunk_s is not None and self.capacity_blocks:
            self.mirror.record_computed(
                self.replica_id, self.dispatch.expected.blocks, self.last_chunk_s
            )
        else:
            self.mirror.unexpect(self.replica_id, self.dispatch.expected.blocks)
        if self.placement and self.first_token_s is not None and self.capacity_blocks:
            self._infer(self.placement.chain)
        self._finish_turn()
        self._teach_answer()
        self.observer.ended(self)

    def end_elsewhere(self, now_s: float, *, is_over: bool) -> None:
        """End an attempt of another router, which has published its end."""
        self.last_chunk_s = now_s
        self.end(None if is_over else "moved")

    def _teach_step(self) -> None:
        """Correct the engine's speed by the mean time between two tokens of the answer."""
        later_tokens = self.output_tokens - self.first_tokens
        if later_tokens > 0 and self.first_token_s is not None and self.last_chunk_s is not None:
            self.load.speed.step((self.last_chunk_s - self.first_token_s) / later_tokens)

    def _teach_answer(self) -> None:
        """Correct the fleet's scale by the time that the answer took."""
        if self.first_token_s is not None and self.last_chunk_s is not None:
            self.scale.answered(self.last_chunk_s - self.first_token_s)

    @property
    def is_over(self) -> bool:
        """Return whether the request ended with this attempt.

        False: the request is in flight, was refused, or is sent to another replica.
        """
        return self.outcome in ("ok", "cancelled")

    def _finish_turn(self) -> None:
        turn = self.dispatch.turn
        at_s = self.last_chunk_s or self.first_token_s or self.sent_s
        if self.seats is not None and turn:
            self.seats.ended(turn.session, at_s)
            if turn.is_last and self.is_over:
                self.seats.session_ended(turn.session)

    def _infer(self, chain: Sequence[Fingerprint]) -> None:
        """Mark the prompt as cached by the replica."""
        added = self.boundaries.added(chain, 0) if self.boundaries else chain
        capacity = self.capacity_blocks * len(added) // max(1, len(chain))
        self.mirror.infer(self.replica_id, added, capacity_blocks=capacity)

    @property
    def reloaded_tokens(self) -> dict[Tier, int]:
        """Return the prompt tokens that came from each slower tier.

        A token counts if the router expected it in the tier and the engine found it cached.
        """
        if self.placement is None or self.cached_tokens is None:
            return {}
        there, size = self.placement.at(self.replica_id), self.placement.block_size
        begin, found = there.gpu_blocks * size, dict[Tier, int]()
        for tier, blocks in there.reloads:
            end = begin + blocks * size
            if tokens := max(0, min(self.cached_tokens, end) - begin):
                found[tier] = tokens
            begin = end
        return found

    @property
    def saved_s(self) -> dict[Tier, float]:
        """Return the predicted prefill that each slower tier saved, less the wait for copies."""
        if self.placement is None or not (reloaded := self.reloaded_tokens):
            return {}
        there = self.placement.at(self.replica_id)
        begin, saved_s = there.gpu_blocks * self.placement.block_size, dict[Tier, float]()
        wait_s = there.reload_s / len(reloaded)
        for tier, tokens in reloaded.items():
            computed_s = self.load.speed.slowness * self.load.model.seconds(begin, begin + tokens)
            saved_s[tier] = max(0.0, computed_s - wait_s)
            begin += tokens
        return saved_s

    @property
    def evicted_why(self) -> EvictionReason:
        """Return why the evicted tokens of the ledger, if any, were evicted."""
        return self.context.retention.lost if self.context.retention else "usual"

    def ledger(self) -> Ledger | None:
        """Return the prompt's tokens by cause; None until the engine has reported."""
        if self.placement is None or self.cached_tokens is None:
            return None
        return account(
            self.placement.prompt_tokens,
            cacheable=len(self.placement.chain) * self.placement.block_size,
            reusable=self.placement.reusable_tokens,
            expected=self.placement.expected_tokens(self.replica_id),
            delivered=self.cached_tokens,
            named=max(self.context.named_tokens, self.placement.shared_tokens),
            partial=self.placement.partial_tokens,
            known=self.placement.known_tokens,
            broken=self.context.broken.lost if self.context.broken else NOTHING,
            is_salted=bool(self.context.namespace),
        )
