"""A router's knowledge about all replicas, from which it ranks them for one request."""

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from kvroute.blocks.cache_groups import UNTOLD
from kvroute.blocks.chain import Scope, Space
from kvroute.blocks.fingerprint import Feature, Fingerprint, reusable_blocks
from kvroute.contract.adapters import LOAD_S
from kvroute.contract.generation import TokenIds
from kvroute.contract.keep import NO_BLOCK, SessionTurn
from kvroute.contract.ranks import replica_of
from kvroute.contract.records import HostTier, ReplicaRecord
from kvroute.prefill.speed import PrefillModel, prefill_model
from kvroute.router.admission.queue import Room
from kvroute.router.admission.seats import Seats
from kvroute.router.index.boundaries import Boundaries, UnknownLayoutError, boundaries_of
from kvroute.router.index.handshake import NONE, Handshake
from kvroute.router.index.mirror import Mirror
from kvroute.router.placement.attempts import (
    NO_OBSERVER,
    Attempt,
    Dispatch,
    Placement,
    RequestContext,
    RequestObserver,
)
from kvroute.router.placement.baselines import Ranking
from kvroute.router.placement.load import (
    ReplicaLoad,
    Sent,
    learned_slowness,
    new_replica_load,
    slow_replicas,
)
from kvroute.router.placement.policy import Candidate, rank
from kvroute.router.placement.pressure import Pressure
from kvroute.router.placement.scale import Scale
from kvroute.router.sessions.branches import Branches
from kvroute.router.sessions.returns import NOTHING_SAID, Retention, Returns, Said

EVERYBODY = Scope()
UNKNOWN_SPEED = PrefillModel(tokens_per_s=10_000.0, attention_tokens=32_768.0)
UNKNOWN_STEP_S = 0.01  # step of an engine, network included, before an answer has shown its length
UNKNOWN_STEP_TOKENS = 8192  # of a replica without a record


class Prompt:
    """What a prompt costs to compute; consecutive replicas of the same speed share the results."""

    def __init__(self, tokens: int, best_hit_blocks: int, block_size: int) -> None:
        self.tokens = tokens
        self._best_tokens = best_hit_blocks * block_size
        self._block_size = block_size
        self._model: PrefillModel | None = None
        self._costs: dict[int, tuple[int, float, float]] = {}

    def at(self, model: PrefillModel, hit_blocks: int) -> tuple[int, float, float]:
        """Tokens to compute; seconds for tokens that no replica holds, and that others hold."""
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
    """The replicas as one router sees them: the index's mirror, their records, all known requests.

    running: returns ids of the replicas that Serve runs; records of other replicas may belong to
    another cluster. None: Serve is not available. step_s: an engine's step before answers have
    shown it. Prompts that take less say nothing of its speed.
    """

    def __init__(
        self,
        *,
        model: str,
        revision: str,
        block_size: int,
        rng: random.Random,
        handshake: Handshake | None = None,
        observer: RequestObserver = NO_OBSERVER,
        ranking: Ranking = rank,
        running: Callable[[], Collection[str]] | None = None,
        seats: Seats[Any] | None = None,
        step_s: float = UNKNOWN_STEP_S,
    ) -> None:
        self._step_s = step_s
        self.seats = seats
        self.mirror = Mirror()
        self.handshake = handshake or Handshake()
        self.observer = observer
        self.returns = Returns(random.Random(rng.getrandbits(64)))
        self._pressure = Pressure()
        self._space = Space(model, revision, block_size)
        self._block_size = block_size
        self._rng = rng
        self._rank = ranking
        self._running = running
        self._records: dict[str, ReplicaRecord] = {}
        self._ranks: dict[str, list[ReplicaRecord]] = {}  # the records of each replica
        self._leased: set[str] = set()  # replicas with a valid lease
        self._free_blocks: dict[str, int] = {}  # of replicas with a record
        self._loads: dict[str, ReplicaLoad] = {}  # of replicas with a record or with requests
        self._branches = Branches()
        self._scale: Scale | None = None  # None: nothing is known of the engines yet
        self._boundaries: dict[str, Boundaries] = {}  # of engines with several cache groups
        self._host_tiers: dict[str, HostTier] = {}  # of replicas that have one
        self.cache_tokens = 0  # that all replicas can keep, as of their latest records

    @property
    def records(self) -> list[ReplicaRecord]:
        """Return the records of all replicas."""
        return list(self._records.values())

    @property
    def scale(self) -> Scale:
        """Return the fleet's units of time. They begin with one full step of an engine."""
        if self._scale is None:
            facts = next((record.facts for record in self._records.values()), None)
            tokens = facts.step_tokens if facts else UNKNOWN_STEP_TOKENS
            model = next((self._speed(id_) for id_ in self._records), UNKNOWN_SPEED)
            if facts is None:
                return Scale(model.seconds(0, tokens))
            self._scale = Scale(model.seconds(0, tokens))
        return self._scale

    @property
    def pressure(self) -> float:
        """Return how tight the caches are: see pressure.py."""
        return self._pressure.value

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and response together that fit on every replica; None: unknown."""
        return min((record.facts.max_model_len for record in self.own_records), default=None)

    @property
    def content_format(self) -> str:
        """Of messages in the chat template, on all replicas; empty: only they can render chats."""
        formats = {record.facts.content_format for record in self.own_records}
        return formats.pop() if len(formats) == 1 else ""

    @property
    def own_records(self) -> list[ReplicaRecord]:
        """Records of the replicas that Serve runs; all records if it runs none or is unknown."""
        running = self._running() if self._running else ()
        if not running:
            return self.records
        return [record for id_ in running for record in self._ranks.get(id_, ())]

    def ranks_of(self, replica_id: str) -> tuple[str, ...]:
        """Those of its ranks that have a record."""
        return tuple(record.id for record in self._ranks.get(replica_id, ()))

    def is_idle(self, replica_id: str) -> bool:
        """Its lease is valid, as far as Redis is reachable, and it has no request in flight."""
        load = self._loads.get(replica_id)
        return replica_id in self._leased and not (load and load.is_busy)

    def backlogs_s(self, replica_ids: Sequence[str], now_s: float) -> list[float]:
        """Seconds of prefill queued or running on each."""
        loads = [self._load(replica_id) for replica_id in replica_ids]
        return [load.backlog_s(load.speed.slowness, now_s) for load in loads]

    def slow_replicas(self, replica_ids: Sequence[str]) -> dict[str, float]:
        """Return those of the replicas that are far slower than the others: see `load.py`."""
        return slow_replicas({replica_id: self._load(replica_id) for replica_id in replica_ids})

    def slowness(self) -> dict[str, float]:
        """Return how many times as long as its engine claims each replica computes prompts."""
        return {replica_id: load.speed.slowness for replica_id, load in self._loads.items()}

    def room_in_s(self, replica_ids: Sequence[str], hold_s: float, now_s: float) -> float:
        """Return the time until the first replica's backlog is below hold_s, if no first token
        comes before; infinite: none will be."""
        loads = [self._load(replica_id) for replica_id in replica_ids]
        return min([load.below_in_s(hold_s, now_s) for load in loads], default=math.inf)

    def rooms(self, replica_ids: Sequence[str], now_s: float) -> list[Room]:
        """What each can take, as far as is known."""
        rooms = []
        backlogs_s = self.backlogs_s(replica_ids, now_s)
        for replica_id, backlog_s in zip(replica_ids, backlogs_s, strict=True):
            load, capacity = self._load(replica_id), self._capacity_tokens(replica_id)
            free_share = 1.0 - load.kv.tokens / capacity if capacity else 1.0
            rooms.append(Room(replica_id, backlog_s, free_share))
        return rooms

    def host_tier(self, replica_id: str) -> dict[str, float] | None:
        """Its size, and the speed of copies from there; None: it has no tier."""
        tier = self._host_tiers.get(replica_id)
        if tier is None:
            return None
        return {"blocks": tier.blocks, "gb_per_s": round(tier.bytes_per_s / 1e9, 3)}

    def prefill_s(self, replica_id: str, tokens: int) -> float:
        """Return the time to compute a prompt of `tokens` tokens there, on an idle replica."""
        load = self._load(replica_id)
        return load.speed.slowness * load.model.seconds(0, tokens)

    def update(
        self,
        records: Iterable[ReplicaRecord],
        *,
        unleased: Iterable[str] = (),
        unreadable: Mapping[str, str] = NONE,
    ) -> None:
        """Takes over the replicas' current records. `unleased`: replicas whose lease expired
        recently, or whose record cannot be read; `unreadable`: why it cannot."""
        self._records = {record.id: record for record in records}
        self._ranks = _by_replica(self._records.values())
        if unreadable and self._running:
            ours = set(self._running())
            unreadable = {id_: why for id_, why in unreadable.items() if replica_of(id_) in ours}
        self._boundaries, unknown = _boundaries(self._records.values())
        self._host_tiers = _host_tiers(self._records.values())
        self.mirror.have_host_tiers(self._host_tiers.keys())
        self.handshake.check(self._records.values(), unreadable, unknown)
        self._leased = self._records.keys() - set(unleased)
        self._free_blocks = {
            record.id: record.facts.capacity_blocks - record.load.used_blocks
            for record in self._records.values()
        }
        self._loads = {
            replica_id: load
            for replica_id, load in self._loads.items()
            if replica_id in self._records or load.is_busy
        }
        for replica_id, load in self._loads.items():
            self._describe(replica_id, load)
        if self.seats is not None:
            self.cache_tokens = sum(map(self._cache_tokens, self._records.values()))

    def told(self, replica_id: str, pending_tokens: int) -> None:
        """What it says just now that it has to compute, for all routers."""
        if replica_id in self._records:
            self._load(replica_id).report(pending_tokens)

    def chain(
        self,
        token_ids: TokenIds,
        scope: Scope = EVERYBODY,
        features: Sequence[Feature] = (),
    ) -> list[Fingerprint]:
        """The fingerprints of the prompt's reusable blocks."""
        blocks = self.reusable(len(token_ids))
        return self._space.chain(token_ids[: blocks * self._block_size], scope, features)

    def reusable(self, prompt_tokens: int) -> int:
        """Blocks of a prompt of that length that a later one can reuse."""
        return self._usable(reusable_blocks(prompt_tokens, self._block_size))

    def holders(
        self, token_ids: TokenIds, scope: Scope = EVERYBODY, *, in_any_tier: bool = False
    ) -> set[str]:
        """The replicas that hold all full blocks of these tokens in GPU memory, or in either."""
        one_more = np.append(token_ids, token_ids[:1])  # makes the last block reusable
        chain = self.chain(one_more, scope)
        hits = self.hits(chain) | (self._hits_in_any_tier(chain) if in_any_tier else {})
        return {id_ for id_, blocks in hits.items() if blocks == len(chain)}

    @property
    def least_blocks(self) -> int:
        """Of the shortest prompt that every replica can reuse."""
        return max((each.step for each in self._boundaries.values()), default=1)

    def added(
        self, replica_id: str, chain: Sequence[Fingerprint], hit_blocks: int = 0
    ) -> tuple[Fingerprint, ...]:
        """What the replica will announce when it computes the chain from there on."""
        if not self._caches(replica_id):
            return ()
        if boundaries := self._boundaries.get(replica_id):
            return tuple(boundaries.added(chain, hit_blocks))
        return tuple(chain[hit_blocks:])

    def hits(self, chain: Sequence[Fingerprint]) -> dict[str, int]:
        """replica id -> blocks of the chain that a request would find in GPU memory there; no
        entry: none."""
        hits = self.mirror.hits(chain)
        return self._by_layout(hits, chain, self.mirror.hits_at) if self._boundaries else hits

    def place(
        self,
        token_ids: TokenIds,
        running: Sequence[str],
        now_s: float,
        scope: Scope = EVERYBODY,
        features: Sequence[Feature] = (),
    ) -> Placement:
        """Ranks the running replicas for this prompt. Replicas that cannot load its LoRA adapter
        are left out, unless none can."""
        chain = self.chain(token_ids, scope, features)
        if lora := scope.lora:
            running = [id_ for id_ in running if self._can_load(id_, lora)] or running
        placement = self.place_chain(chain, len(token_ids), running, now_s, lora)
        if scope.shared_tokens:
            return replace(placement, shared_tokens=scope.shared_tokens)
        return placement

    def place_chain(
        self,
        chain: Sequence[Fingerprint],
        prompt_tokens: int,
        running: Sequence[str],
        now_s: float,
        lora: str = "",
    ) -> Placement:
        """Ranks the running replicas for a prompt with these reusable blocks."""
        hits = self.hits(chain)
        for replica_id in self.handshake.degraded:
            hits.pop(replica_id, None)
        reloads = self._reloads(chain, hits, now_s) if self._host_tiers else {}
        for replica_id, (host_blocks, _) in reloads.items():
            hits[replica_id] = hits.get(replica_id, 0) + host_blocks
        best = max([hits.get(replica_id, 0) for replica_id in running], default=0)
        prefix = chain[:best]
        prompt = Prompt(prompt_tokens, best, self._block_size)
        candidates = self._candidates(running, prompt, hits, prefix, now_s)
        if lora:
            candidates = [self._with_lora(each, lora) for each in candidates]
        if reloads:
            candidates = [_with_reload(each, reloads) for each in candidates]
        busy_s, pressure = self.scale.busy_s, self._pressure.value
        has_forked = self._branches.forks(prefix) > 0
        ranking = self._rank(
            candidates, rng=self._rng, busy_s=busy_s, pressure=pressure, has_forked=has_forked
        )
        return Placement(
            ranking=tuple(ranking),
            chain=tuple(chain),
            best_hit_blocks=best,
            prompt_tokens=prompt_tokens,
            block_size=self._block_size,
            busy_s=busy_s,
            has_forked=has_forked,
            pressure=pressure,
            lora=lora,
            known_blocks=self._known(chain, best),
            partial_blocks=self._partial(chain, best),
        )

    def retention(self, placement: Placement, said: Said = NOTHING_SAID) -> Retention:
        """Return how a replica is to keep the prompt's blocks."""
        shared_blocks = placement.shared_tokens // placement.block_size
        chain, known_blocks = placement.chain, placement.known_blocks
        return self.returns.retention(chain, known_blocks, said, shared_blocks)

    def sent(
        self,
        placement: Placement,
        replica_id: str,
        request_id: str,
        now_s: float,
        context: RequestContext | None = None,
    ) -> Attempt:
        """The request was sent there: it counts as load, and its blocks are expected."""
        there, load = placement.at(replica_id), self._load(replica_id)
        retention = context.retention if context else None
        hit_tokens = there.hit_blocks * self._block_size
        prefill_s = load.model.seconds(hit_tokens, placement.prompt_tokens)
        dispatch = Dispatch(
            request_id=request_id,
            replica_id=replica_id,
            prefill_s=prefill_s + there.lora_s / load.speed.slowness,
            new_tokens=placement.prompt_tokens - hit_tokens,
            prompt_tokens=placement.prompt_tokens,
            known_prefix=placement.known_prefix[-1:],
            expected=self.added(replica_id, placement.chain, there.hit_blocks - there.host_blocks),
            lora=placement.lora,
            loads_first=there.lora_s > 0 or there.reload_s > 0,
            turn=retention and retention.turn,
        )
        if retention and not self.returns.knows(retention.turn):  # not sent before, elsewhere
            self._pressure.sent(
                computed_tokens=placement.new_tokens, evicted_tokens=placement.evicted_tokens
            )
        attempt = self.begin(dispatch, now_s, 0.0 if there.lora_s else there.reload_s)
        attempt.placement, attempt.observer = placement, self.observer
        attempt.boundaries = self._boundaries.get(replica_id)
        attempt.context = context or attempt.context
        self.observer.sent(attempt)
        return attempt

    def begin(self, dispatch: Dispatch, now_s: float, reload_s: float = 0.0) -> Attempt:
        """Counts a dispatch, of this router or of another, as load. reload_s: until its blocks are
        back from host memory, while the engine computes others."""
        load = self._load(dispatch.replica_id)
        load.send(
            dispatch.request_id,
            Sent(
                prefill_s=dispatch.prefill_s,
                new_tokens=dispatch.new_tokens,
                prompt_tokens=dispatch.prompt_tokens,
                sent_s=now_s,
                lora=dispatch.lora,
                loads_first=dispatch.loads_first,
                reload_s=reload_s,
                prefix=dispatch.known_prefix[-1] if dispatch.known_prefix else None,
            ),
        )
        fleet = self.mirror.replica_ids | {dispatch.replica_id}
        self._branches.take(dispatch.known_prefix, dispatch.replica_id, fleet)
        self.scale.computed(load.speed.slowness * dispatch.prefill_s)
        self.mirror.forget_computed(now_s)
        self.mirror.expect(dispatch.replica_id, dispatch.expected)
        if dispatch.turn:
            self.returns.begin(dispatch.turn)
            self._take_seat(dispatch.turn, dispatch, now_s)
        return Attempt(
            self.mirror,
            load,
            dispatch,
            self._capacity_blocks(dispatch.replica_id),
            now_s,
            RequestContext(now_s),
            scale=self.scale,
            seats=self.seats if dispatch.turn else None,
        )

    def end_session(self, session: int) -> None:
        """Record that no further turn of the session comes, as its client says."""
        self.returns.end(session)
        if self.seats is not None:
            self.seats.session_ended(session)

    def _cache_tokens(self, record: ReplicaRecord) -> int:
        """Return the tokens that a replica can keep, in host memory too where blocks come back from
        there sooner than they are computed."""
        facts, tier = record.facts, self._host_tiers.get(record.id)
        if not facts.prefix_caching:
            return 0
        compute_s = self.prefill_s(record.id, facts.block_size)
        host_blocks = tier.blocks if tier and tier.reload_s(1) < compute_s else 0
        return (facts.capacity_blocks + host_blocks) * facts.block_size

    def _take_seat(self, turn: SessionTurn, dispatch: Dispatch, now_s: float) -> None:
        if self.seats is not None:
            block = dispatch.known_prefix[-1] if dispatch.known_prefix else NO_BLOCK
            known = block, dispatch.prompt_tokens - dispatch.new_tokens
            self.seats.sent(
                turn, dispatch.prompt_tokens, tenant=turn.tenant, known=known, now_s=now_s
            )

    def _candidates(
        self,
        running: Sequence[str],
        prompt: Prompt,
        hits: Mapping[str, int],
        prefix: Sequence[Fingerprint],
        now_s: float,
    ) -> list[Candidate]:
        """Most of a decision's time is spent here, once for each replica; so without keywords."""
        known, free_blocks = self._loads, self._free_blocks
        loads = [known.get(replica_id) or self._load(replica_id) for replica_id in running]
        candidates = []
        branches = self._branches.shares(prefix, running)
        learned = learned_slowness(loads)
        for replica_id, load, (slowness, healthy), share in zip(
            running, loads, learned, branches, strict=True
        ):
            hit_blocks = hits.get(replica_id, 0)
            new_tokens, own_s, copy_s = prompt.at(load.model, hit_blocks)
            candidates.append(
                Candidate(
                    replica_id,
                    hit_blocks,
                    load.backlog_s(slowness, now_s),
                    slowness * own_s,
                    slowness * copy_s,
                    (load.pending_tokens + new_tokens) / load.step_tokens,
                    slowness * load.decode_step_s,
                    free_blocks.get(replica_id, 0),
                    load.unanswered,
                    self._memory_s(load, new_tokens, prompt.tokens, prefix),
                    branch_share=share,
                    worth=healthy / slowness,
                )
            )
        return candidates

    def _memory_s(
        self, load: ReplicaLoad, new_tokens: int, tokens: int, prefix: Sequence[Fingerprint]
    ) -> float:
        """Return the time until the replica's KV cache has room for a prompt.

        Its answers end one after the other, and free their tokens at an even rate; those that run
        have half of their time left in the mean.
        """
        if not load.decoding or not load.capacity_tokens:
            return 0.0
        needed = load.kv.needed(
            new_tokens=new_tokens, cached_tokens=tokens - new_tokens, prefix=prefix
        )
        missing = needed - load.capacity_tokens
        return self.scale.answer_s * missing / (2.0 * load.kv.tokens) if missing > 0 else 0.0

    def _by_layout(
        self,
        plain: dict[str, int],
        chain: Sequence[Fingerprint],
        hits_at: Callable[[Sequence[Fingerprint], Boundaries], dict[str, int]],
    ) -> dict[str, int]:
        """The hits where engines with several cache groups have those that their layouts allow."""
        hits = {id_: blocks for id_, blocks in plain.items() if id_ not in self._boundaries}
        for boundaries in set(self._boundaries.values()):
            found = hits_at(chain, boundaries)
            hits |= {id_: n for id_, n in found.items() if self._boundaries.get(id_) is boundaries}
        return hits

    def _reloads(
        self, chain: Sequence[Fingerprint], hits: Mapping[str, int], now_s: float
    ) -> dict[str, tuple[int, float]]:
        """replica id -> blocks that it would reload behind the hit in its GPU's memory, and the
        seconds until it has; no entry: none, or it computes them in less time. The line of copies
        before counts for the request, and not in that choice: computing delays all others, too."""
        found = {}
        for replica_id, depth in self._hits_in_any_tier(chain).items():
            begin = hits.get(replica_id, 0)
            if depth <= begin or replica_id in self.handshake.degraded:
                continue
            load, tier = self._load(replica_id), self._host_tiers[replica_id]
            reload_s = tier.reload_s(depth - begin)
            tokens = begin * self._block_size, depth * self._block_size
            if reload_s < load.speed.slowness * load.model.seconds(*tokens):
                found[replica_id] = (depth - begin, load.reloads.wait_s(now_s) + reload_s)
        return found | self._awaited(chain, hits, found, now_s)

    def _hits_in_any_tier(self, chain: Sequence[Fingerprint]) -> dict[str, int]:
        """As `hits`, for the replicas that have a host tier."""
        hits = self.mirror.hits_in_any_tier(chain)
        if not self._boundaries:
            return hits
        return self._by_layout(hits, chain, self.mirror.hits_at_in_any_tier)

    def _awaited(
        self,
        chain: Sequence[Fingerprint],
        hits: Mapping[str, int],
        reloads: Mapping[str, tuple[int, float]],
        now_s: float,
    ) -> dict[str, tuple[int, float]]:
        """Replicas where a hit ends with blocks that an earlier request waits for, too."""
        found = {}
        for replica_id in self._host_tiers.keys() & hits.keys() - reloads.keys():
            wait_s = self._load(replica_id).reloads.wait_s(now_s)
            if wait_s and not self.mirror.is_held(replica_id, chain[hits[replica_id] - 1]):
                found[replica_id] = (0, wait_s)
        return found

    def _usable(self, blocks: int) -> int:
        """Of a prompt's blocks, those before the last boundary at which a hit can end."""
        layouts = self._boundaries.values()
        if len(layouts) < len(self._records) or not layouts:
            return blocks
        return max(boundaries.usable(blocks) for boundaries in layouts)

    def _partial(self, chain: Sequence[Fingerprint], at_least: int) -> int:
        """Return the leading blocks that the first cache group of some replica has."""
        for boundaries in self._boundaries.values():
            return max(at_least, self.mirror.in_first_group(chain, boundaries))
        return at_least

    def _known(self, chain: Sequence[Fingerprint], at_least: int) -> int:
        """Leading blocks of the chain that some replica holds or once held."""
        for boundaries in self._boundaries.values():
            return max(at_least, boundaries.known(chain, self.mirror.is_known))
        return self.mirror.known(chain, at_least=at_least)

    def _with_lora(self, candidate: Candidate, lora: str) -> Candidate:
        if lora in self._load(candidate.replica_id).loras:
            return candidate
        record = self._records.get(candidate.replica_id)
        lora_s = record.load.lora_load_s if record else LOAD_S
        return candidate._replace(lora_s=lora_s)

    def _can_load(self, replica_id: str, lora: str) -> bool:
        """Whether the replica can load the adapter; yes if it does not report its adapters."""
        record = self._records.get(replica_id)
        identity = record.identity if record else None
        return identity is None or lora in identity.adapters

    def _load(self, replica_id: str) -> ReplicaLoad:
        load = self._loads.get(replica_id)
        if load is None:
            record = self._records.get(replica_id)
            step_tokens = record.facts.step_tokens if record else UNKNOWN_STEP_TOKENS
            load = new_replica_load(
                self._speed(replica_id), step_tokens, self._loads.values(), step_s=self._step_s
            )
            self._loads[replica_id] = load
            self._describe(replica_id, load)
        return load

    def _describe(self, replica_id: str, load: ReplicaLoad) -> None:
        """Take over what the replica's record says."""
        load.model = self._speed(replica_id)
        load.capacity_tokens = self._capacity_tokens(replica_id)
        if record := self._records.get(replica_id):
            load.step_tokens = record.facts.step_tokens
            _report_loras(load, record)

    def _speed(self, replica_id: str) -> PrefillModel:
        record = self._records.get(replica_id)
        if record is None:
            return UNKNOWN_SPEED
        return prefill_model(record.facts.prefill_tokens_per_s, record.facts.attention_tokens)

    def _capacity_blocks(self, replica_id: str) -> int:
        """The cache's size in blocks; 0 if there is no prefix cache, or the replica is unknown."""
        if not self._caches(replica_id):
            return 0
        return self._records[replica_id].facts.capacity_blocks

    def _capacity_tokens(self, replica_id: str) -> int:
        """The KV cache's size; 0: the replica is unknown."""
        record = self._records.get(replica_id)
        return record.facts.capacity_blocks * record.facts.block_size if record else 0

    def _caches(self, replica_id: str) -> bool:
        record = self._records.get(replica_id)
        if record is None or replica_id in self.handshake.degraded:
            return False
        return record.facts.prefix_caching


def _with_reload(candidate: Candidate, reloads: Mapping[str, tuple[int, float]]) -> Candidate:
    if candidate.replica_id not in reloads:
        return candidate
    host_blocks, reload_s = reloads[candidate.replica_id]
    return candidate._replace(host_blocks=host_blocks, reload_s=reload_s)


def _by_replica(records: Iterable[ReplicaRecord]) -> dict[str, list[ReplicaRecord]]:
    ranks: dict[str, list[ReplicaRecord]] = {}
    for record in records:
        ranks.setdefault(replica_of(record.id), []).append(record)
    return ranks


def _boundaries(
    records: Iterable[ReplicaRecord],
) -> tuple[dict[str, Boundaries], dict[str, str]]:
    """Of the replicas whose engines have several cache groups; and why those of some are unknown,
    by replica id."""
    known, unknown = dict[str, Boundaries](), dict[str, str]()
    for record in records:
        facts = record.facts
        if facts.layout is None or not facts.prefix_caching:
            continue
        try:
            known[record.id] = boundaries_of(facts.layout, facts.block_size)
        except UnknownLayoutError as error:
            unknown[record.id] = f"{UNTOLD}{error}"
    return known, unknown


def _host_tiers(records: Iterable[ReplicaRecord]) -> dict[str, HostTier]:
    """Of the replicas that have one, by id; with the speed that they have shown."""
    return {
        record.id: replace(tier, bytes_per_s=record.load.host_bytes_per_s or tier.bytes_per_s)
        for record in records
        if (tier := record.facts.host) and record.facts.prefix_caching
    }


def _report_loras(load: ReplicaLoad, record: ReplicaRecord) -> None:
    load.report_loras(record.load.loras, record.facts.max_cpu_loras)
