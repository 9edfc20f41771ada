"""One request's way to a replica: where it was placed and why, what it hears there, how it ends."""

from dataclasses import dataclass
from typing import Literal

from replica.kvindex.fingerprint import Fingerprint
from replica.protocol import Chunk, TraceContext
from router.routing.ledger import Ledger, account
from router.routing.load import ReplicaLoad
from router.routing.mirror import Mirror
from router.routing.policy import Candidate


@dataclass(frozen=True, slots=True)
class Placement:
    """A prompt's replicas, best first, and what the router counts on at each."""

    ranking: tuple[Candidate, ...]
    chain: tuple[Fingerprint, ...]  # the prompt's reusable blocks
    best_hit_blocks: int  # the most that any replica has of it
    prompt_tokens: int
    block_size: int
    forks: float = 0.0  # requests that left the known prefix before this one
    lora: str = ""  # the LoRA adapter that it is for
    known_blocks: int = 0  # the most of the prompt that any replica has, or had once

    def at(self, replica_id: str) -> Candidate:
        """The candidate of that name; one without hits when the replica was not ranked."""
        for candidate in self.ranking:
            if candidate.replica_id == replica_id:
                return candidate
        return Candidate(replica_id, hit_blocks=0, backlog_s=0.0, own_s=0.0)

    @property
    def known_prefix(self) -> tuple[Fingerprint, ...]:
        """What some replica has of the prompt."""
        return self.chain[: self.best_hit_blocks]

    @property
    def reusable_tokens(self) -> int:
        return self.best_hit_blocks * self.block_size

    def expected_tokens(self, replica_id: str) -> int:
        return self.at(replica_id).hit_blocks * self.block_size

    def predicted_ttft_s(self, replica_id: str) -> float:
        there = self.at(replica_id)
        return there.backlog_s + there.own_s + there.copy_s + there.lora_s


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client's call asks for, the same for each of its prompts."""

    at_s: float  # when its prompts came to be sent somewhere, on the clock of the trips
    request_id: str = ""  # as the client knows it; a dispatch's is a longer one
    choices: int = 1  # for each prompt
    namespace: str = ""  # its cache_salt; empty: it shares what is cached
    lora: str = ""  # LoRA adapter that answers; empty: the model itself
    named_tokens: int = 0  # of whole blocks, of the named prefix that it goes on from
    is_resumed: bool = False  # another replica, lost since, has said the beginning


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A request on its way to a replica, as far as it matters to other requests."""

    request_id: str
    replica_id: str
    prefill_s: float  # as the replica's speed model predicts it
    new_tokens: int  # prompt tokens to compute there
    prompt_tokens: int
    known_prefix: tuple[Fingerprint, ...]  # the end of what some replica had of it; empty: nothing
    expected: tuple[Fingerprint, ...]  # blocks that it will put there
    lora: str = ""  # LoRA adapter that it is for
    loads_lora: bool = False  # first, as far as the router knows


# How a trip ends. refused: the engine cannot run it, or nobody has room. failed: it was lost with
# its replica, and is sent again where that is possible. moved: the replica was full or gone before
# it came, and it went to another one.
Outcome = Literal["ok", "cancelled", "refused", "failed", "moved"]


class Witness:
    """Learns what this router does with its requests; by itself makes nothing of it."""

    def placed(self, placement: Placement, decision_s: float) -> None:
        """A request's replicas were ranked, which took so long."""

    def sent(self, trip: "Trip") -> None: ...

    def first_token(self, trip: "Trip") -> None: ...

    def next_chunk(self, trip: "Trip", gap_s: float) -> None:
        """Came so long after the one before it."""

    def ended(self, trip: "Trip") -> None: ...


class Witnesses(Witness):
    """Several as one."""

    def __init__(self, *witnesses: Witness) -> None:
        self._witnesses = witnesses

    def placed(self, placement: Placement, decision_s: float) -> None:
        for witness in self._witnesses:
            witness.placed(placement, decision_s)

    def sent(self, trip: "Trip") -> None:
        for witness in self._witnesses:
            witness.sent(trip)

    def first_token(self, trip: "Trip") -> None:
        for witness in self._witnesses:
            witness.first_token(trip)

    def next_chunk(self, trip: "Trip", gap_s: float) -> None:
        for witness in self._witnesses:
            witness.next_chunk(trip, gap_s)

    def ended(self, trip: "Trip") -> None:
        for witness in self._witnesses:
            witness.ended(trip)


NOBODY = Witness()


@dataclass(slots=True)
class Trip:
    """One request at one replica, from being sent until it ends, however it ends."""

    mirror: Mirror
    load: ReplicaLoad
    dispatch: Dispatch
    capacity_blocks: int  # of the replica's cache
    sent_s: float
    asked: Asked
    placement: Placement | None = None  # why it went there, when this router sent it
    witness: Witness = NOBODY
    trace: TraceContext | None = None  # its span, where a witness keeps one
    unfinished: int = 1  # choices
    output_tokens: int = 0  # of all choices
    first_tokens: int = 0  # those among them that came in the first chunk
    cached_tokens: int | None = None  # of the prompt, as the engine says with the first chunk
    first_token_s: float | None = None
    last_chunk_s: float | None = None
    outcome: Outcome | None = None  # None: it is under way

    @property
    def request_id(self) -> str:
        return self.dispatch.request_id

    @property
    def replica_id(self) -> str:
        return self.dispatch.replica_id

    def hear(self, chunk: Chunk, now_s: float) -> None:
        """The replica said that."""
        self.output_tokens += len(chunk.token_ids)
        self.unfinished -= chunk.finish_reason is not None
        if self.last_chunk_s is None:
            self.first_tokens = self.output_tokens
            self.cached_tokens = chunk.cached_tokens
            self.first_token(now_s)
        else:
            self.witness.next_chunk(self, now_s - self.last_chunk_s)
        self.last_chunk_s = now_s

    def first_token(self, now_s: float) -> None:
        self.first_token_s = now_s
        self.load.first_token(self.request_id, now_s)
        self.witness.first_token(self)

    def end(self, outcome: Outcome | None = None) -> None:
        """Harmless the second time. Nothing said: whatever was heard decides."""
        if self.outcome is not None:
            return
        self.outcome = outcome or ("cancelled" if self.unfinished else "ok")
        self.load.finish(self.request_id)
        self.mirror.unexpect(self.replica_id, self.dispatch.expected)
        if self.placement and self.first_token_s is not None and self.capacity_blocks:
            chain, capacity_blocks = self.placement.chain, self.capacity_blocks
            self.mirror.presume(self.replica_id, chain, capacity_blocks=capacity_blocks)
        self.witness.ended(self)

    def ledger(self) -> Ledger | None:
        """Where the prompt's tokens came from; None while the engine has said nothing."""
        if self.placement is None or self.cached_tokens is None:
            return None
        return account(
            self.placement.prompt_tokens,
            cacheable=len(self.placement.chain) * self.placement.block_size,
            reusable=self.placement.reusable_tokens,
            expected=self.placement.expected_tokens(self.replica_id),
            delivered=self.cached_tokens,
            named=self.asked.named_tokens,
            known=self.placement.known_blocks * self.placement.block_size,
            is_salted=bool(self.asked.namespace),
        )
