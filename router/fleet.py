"""What this router knows of every replica, and the judgement it makes of it for one request."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from replica.kvindex.fingerprint import Fingerprint, fingerprints, reusable_blocks, root
from replica.kvindex.index import ReplicaRecord
from replica.protocol import Chunk, TokenIds
from router.baselines import Ranking
from router.branches import Branches, relative
from router.ledger import Ledger, account
from router.load import PrefillModel, ReplicaLoad, Sent, learned_slowness, prefill_model
from router.mirror import Mirror
from router.policy import Candidate, rank

UNKNOWN_SPEED = PrefillModel(tokens_per_s=10_000.0, attention_tokens=32_768.0)


@dataclass(frozen=True, slots=True)
class Placement:
    """A prompt's replicas, best first, and what the router counts on at each."""

    ranking: tuple[Candidate, ...]
    chain: tuple[Fingerprint, ...]  # the prompt's reusable blocks
    best_hit_blocks: int  # the most that any replica has of it
    prompt_tokens: int
    block_size: int
    forks: float = 0.0  # requests that left the known prefix before this one

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
        return there.backlog_s + there.own_s + there.copy_s


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asked for, as far as it matters to those who watch."""

    at_s: float  # when its request came to be sent somewhere, on the clock of the trips
    choices: int = 1
    is_salted: bool = False
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


class Prompt:
    """What a prompt costs to compute; computed once for replicas in a row that are alike."""

    def __init__(self, tokens: int, best_hit_blocks: int, block_size: int) -> None:
        self.tokens = tokens
        self._best_tokens = best_hit_blocks * block_size
        self._block_size = block_size
        self._model: PrefillModel | None = None
        self._costs: dict[int, tuple[int, float, float]] = {}

    def at(self, model: PrefillModel, hit_blocks: int) -> tuple[int, float, float]:
        """Tokens to compute; seconds for what no replica holds, and for what others hold."""
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


class Fleet:
    """The replicas as one router sees them: the index's mirror, their records, its own requests."""

    def __init__(
        self,
        *,
        model: str,
        revision: str,
        block_size: int,
        rng: random.Random,
        witness: Witness = NOBODY,
        ranking: Ranking = rank,
    ) -> None:
        self.mirror = Mirror()
        self.witness = witness
        self._model = model
        self._revision = revision
        self._block_size = block_size
        self._rng = rng
        self._rank = ranking
        self._records: dict[str, ReplicaRecord] = {}
        self._leased: set[str] = set()  # those whose lease runs
        self._free_blocks: dict[str, int] = {}  # of replicas with a record
        self._loads: dict[str, ReplicaLoad] = {}  # of those with a record or with requests
        self._branches = Branches()

    @property
    def records(self) -> list[ReplicaRecord]:
        return list(self._records.values())

    @property
    def max_model_len(self) -> int | None:
        """Tokens that prompt and answer may have together on every replica; None: none is known."""
        lengths = [record.facts["max_model_len"] for record in self._records.values()]
        return min(lengths, default=None)

    def is_idle(self, replica_id: str) -> bool:
        """Its lease runs, as far as Redis lets us know, and no request is under way there."""
        load = self._loads.get(replica_id)
        return replica_id in self._leased and not (load and load.is_busy)

    def backlogs_s(self, replica_ids: Sequence[str], now_s: float) -> list[float]:
        """Seconds of prefill queued or running on each."""
        loads = [self._load(replica_id) for replica_id in replica_ids]
        return [load.backlog_s(load.slowness, now_s) for load in loads]

    def prefill_s(self, replica_id: str, tokens: int) -> float:
        """Seconds to compute a prompt of so many tokens there, if it has nothing else to do."""
        load = self._load(replica_id)
        return load.slowness * load.model.seconds(0, tokens)

    def update(self, records: Iterable[ReplicaRecord], *, unleased: Iterable[str] = ()) -> None:
        """The replicas, with their loads of now. `unleased`: whose lease ran out not long ago."""
        self._records = {record.id: record for record in records}
        self._leased = self._records.keys() - set(unleased)
        self._free_blocks = {
            record.id: record.facts["capacity_blocks"] - record.load["used_blocks"]
            for record in self._records.values()
        }
        self._loads = {
            replica_id: load
            for replica_id, load in self._loads.items()
            if replica_id in self._records or load.is_busy
        }
        for replica_id, load in self._loads.items():
            load.model = self._speed(replica_id)
            if record := self._records.get(replica_id):
                load.report(record.load["waiting"])

    def chain(self, token_ids: TokenIds, namespace: str) -> list[Fingerprint]:
        """The fingerprints of the blocks that this prompt could take from a cache."""
        parent = root(
            model=self._model,
            revision=self._revision,
            block_size=self._block_size,
            namespace=namespace,
        )
        blocks = reusable_blocks(len(token_ids), self._block_size)
        return fingerprints(
            token_ids[: blocks * self._block_size], block_size=self._block_size, parent=parent
        )

    def holders(self, token_ids: TokenIds) -> set[str]:
        """The replicas that hold all full blocks of these tokens, without a salt."""
        chain = self.chain(np.append(token_ids, token_ids[:1]), "")  # so that the last one counts
        return {id_ for id_, blocks in self.mirror.hits(chain).items() if blocks == len(chain)}

    def place(
        self, token_ids: TokenIds, namespace: str, running: Sequence[str], now_s: float
    ) -> Placement:
        """Ranks the running replicas for this prompt."""
        chain = self.chain(token_ids, namespace)
        return self.place_chain(chain, len(token_ids), running, now_s)

    def place_chain(
        self,
        chain: Sequence[Fingerprint],
        prompt_tokens: int,
        running: Sequence[str],
        now_s: float,
    ) -> Placement:
        """Ranks the running replicas for a prompt with these reusable blocks."""
        hits = self.mirror.hits(chain)
        best = max((hits.get(replica_id, 0) for replica_id in running), default=0)
        prefix = chain[:best]
        prompt = Prompt(prompt_tokens, best, self._block_size)
        candidates = self._candidates(running, prompt, hits, prefix, now_s)
        forks = self._branches.forks(prefix)
        ranking = self._rank(candidates, forks=forks, rng=self._rng)
        return Placement(
            ranking=tuple(ranking),
            chain=tuple(chain),
            best_hit_blocks=best,
            prompt_tokens=prompt_tokens,
            block_size=self._block_size,
            forks=forks,
        )

    def sent(
        self,
        placement: Placement,
        replica_id: str,
        request_id: str,
        now_s: float,
        asked: Asked | None = None,
    ) -> "Trip":
        """The request is on its way there: it counts as load, and its blocks are expected."""
        hit_blocks = placement.at(replica_id).hit_blocks
        hit_tokens = hit_blocks * self._block_size
        dispatch = Dispatch(
            request_id=request_id,
            replica_id=replica_id,
            prefill_s=self._load(replica_id).model.seconds(hit_tokens, placement.prompt_tokens),
            new_tokens=placement.prompt_tokens - hit_tokens,
            prompt_tokens=placement.prompt_tokens,
            known_prefix=placement.known_prefix[-1:],
            expected=placement.chain[hit_blocks:] if self._caches(replica_id) else (),
        )
        trip = self.begin(dispatch, now_s)
        trip.placement, trip.witness = placement, self.witness
        trip.asked = asked or trip.asked
        trip.unfinished = trip.asked.choices
        self.witness.sent(trip)
        return trip

    def begin(self, dispatch: Dispatch, now_s: float) -> "Trip":
        """Takes a dispatch into account, this router's own or another's."""
        load = self._load(dispatch.replica_id)
        load.send(
            dispatch.request_id,
            Sent(dispatch.prefill_s, dispatch.new_tokens, dispatch.prompt_tokens, now_s),
        )
        fleet = self.mirror.replica_ids | {dispatch.replica_id}
        self._branches.take(dispatch.known_prefix, dispatch.replica_id, fleet)
        self.mirror.expect(dispatch.replica_id, dispatch.expected)
        capacity_blocks = self._capacity_blocks(dispatch.replica_id)
        return Trip(self.mirror, load, dispatch, capacity_blocks, now_s, Asked(now_s))

    def _candidates(
        self,
        running: Sequence[str],
        prompt: Prompt,
        hits: Mapping[str, int],
        prefix: Sequence[Fingerprint],
        now_s: float,
    ) -> list[Candidate]:
        """Most of a decision's time is spent here, once for each replica: hence no keywords."""
        loads = [self._load(replica_id) for replica_id in running]
        replicas = zip(
            running,
            loads,
            learned_slowness(loads),
            relative([load.recent(now_s) for load in loads]),
            self._branches.shares(prefix, running),
            strict=True,
        )
        candidates = []
        for replica_id, load, slowness, recent_share, branch_share in replicas:
            hit_blocks = hits.get(replica_id, 0)
            new_tokens, own_s, copy_s = prompt.at(load.model, hit_blocks)
            candidates.append(
                Candidate(
                    replica_id,
                    hit_blocks,
                    load.backlog_s(slowness, now_s),
                    slowness * own_s,
                    slowness * copy_s,
                    load.pending_tokens,
                    new_tokens,
                    recent_share,
                    branch_share,
                    load.decode_step_s,
                    self._free_blocks.get(replica_id, 0),
                    load.unanswered,
                )
            )
        return candidates

    def _load(self, replica_id: str) -> ReplicaLoad:
        load = self._loads.get(replica_id)
        if load is None:
            load = self._loads[replica_id] = ReplicaLoad(self._speed(replica_id))
        return load

    def _speed(self, replica_id: str) -> PrefillModel:
        record = self._records.get(replica_id)
        if record is None:
            return UNKNOWN_SPEED
        return prefill_model(record.facts["prefill_tokens_per_s"], record.facts["attention_tokens"])

    def _capacity_blocks(self, replica_id: str) -> int:
        """Of its cache; 0 when it has none, or is unknown."""
        if not self._caches(replica_id):
            return 0
        return int(self._records[replica_id].facts["capacity_blocks"])

    def _caches(self, replica_id: str) -> bool:
        record = self._records.get(replica_id)
        return record is not None and bool(record.facts["prefix_caching"])


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
            is_salted=self.asked.is_salted,
        )
