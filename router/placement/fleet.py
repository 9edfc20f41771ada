"""The replicas of a model: ranks them for a prompt, and counts the requests sent to them."""

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from kvroute.blocks.chain import EVERYBODY, Scope, Space
from kvroute.blocks.fingerprint import Fingerprint, MediaSpan
from kvroute.contract.generation import TokenIds
from kvroute.contract.messages import Dispatch, Fingerprints
from kvroute.contract.records import ReplicaRecord
from kvroute.features.placing_feature import NO_FEATURES, PlacingFeatures
from kvroute.router.index.handshake import NO_REASONS, Handshake
from kvroute.router.placement.attempts import (
    NO_OBSERVER,
    Attempt,
    Placement,
    RequestContext,
    RequestObserver,
)
from kvroute.router.placement.baselines import Ranking
from kvroute.router.placement.caches import NO_RELOAD, Caches, Hits
from kvroute.router.placement.load import PendingRequest, PromptCost, ReplicaLoad, learned_slowness
from kvroute.router.placement.loads import UNKNOWN_STEP_S, Loads
from kvroute.router.placement.policy import Candidate, PromptFacts, prices, rank
from kvroute.router.placement.pressure import Pressure
from kvroute.router.placement.replicas import ReplicaRegistry
from kvroute.router.sessions.branches import Branches
from kvroute.router.sessions.turns import Turns


class Fleet:
    """All replicas of a model as one router sees them.

    Args:
        ranking: the routing policy.
        running: see ReplicaRegistry.
        features: the features that have a part in placements.
        step_s: see Loads.
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
        features: PlacingFeatures = NO_FEATURES,
        step_s: float = UNKNOWN_STEP_S,
    ) -> None:
        self.replicas = ReplicaRegistry(handshake or Handshake(), running)
        self.loads = Loads(self.replicas, step_s=step_s)
        self.caches = Caches(Space(model, revision, block_size), self.replicas, self.loads)
        self.mirror = self.caches.mirror  # this router's copy of the index of cached blocks
        self.observer = observer
        self.features = features
        self.turns = Turns(random.Random(rng.getrandbits(64)), features.turn_began)
        self.pressure = Pressure()
        self._branches = Branches()  # where prompts diverged, and the replicas that got them
        self._block_size = block_size
        self._rank = ranking
        self._weigh = features.weigh if ranking is rank else []
        self._rng = rng

    def update(
        self,
        records: Iterable[ReplicaRecord],
        *,
        unleased: Iterable[str] = (),
        unreadable: Mapping[str, str] = NO_REASONS,
    ) -> None:
        """Replace the replicas' records; see ReplicaRegistry.update."""
        self.replicas.update(records, unleased=unleased, unreadable=unreadable)
        self.caches.update()
        self.loads.update()
        for updated in self.features.updated:
            updated(self)

    # Placement.

    def place(
        self,
        token_ids: TokenIds,
        running: Sequence[str],
        now_s: float,
        scope: Scope = EVERYBODY,
        media: Sequence[MediaSpan] = (),
        *,
        is_known: bool = True,
    ) -> Placement:
        """Rank replicas for a prompt.

        Replicas that cannot run the prompt's variant of the model are left out. If no replica can
        run it, all are ranked.

        Args:
            running: the replicas that may get the prompt.
            scope: which prompts may share blocks with this one: those with its namespace and for
                its variant of the model.
            media: images, videos and sounds in the prompt.
            is_known: whether these are the tokens of the prompt. False: only their number counts,
                and no replica has them cached.
        """
        chain = self.caches.chain(token_ids, scope, media) if is_known else []
        if variant := scope.variant:
            running = self.usable(variant, running) or running
        placement = self.place_chain(chain, len(token_ids), running, now_s, variant=variant)
        if scope.shared_tokens:
            return replace(placement, shared_tokens=scope.shared_tokens)
        return placement

    def usable(self, variant: str, replica_ids: Sequence[str]) -> Sequence[str]:
        """Return those of the replicas that can run a variant of the model."""
        for usable in (self.replicas.usable, *self.features.usable):
            replica_ids = usable(variant, replica_ids)
        return replica_ids

    def place_chain(
        self,
        chain: Sequence[Fingerprint],
        prompt_tokens: int,
        running: Sequence[str],
        now_s: float,
        *,
        variant: str = "",
    ) -> Placement:
        """Rank replicas as `place` does, for a prompt that is given by its reusable blocks.

        Args:
            chain: the fingerprints of the prompt's reusable blocks.
            prompt_tokens: tokens of the prompt.
            running: the replicas that may get the prompt.
            variant: the variant of the model; see Scope.
        """
        hits = self.caches.find(chain, now_s)
        best = max([hits.blocks.get(replica_id, 0) for replica_id in running], default=0)
        prefix = chain[:best]
        candidates: Sequence[Candidate] = self._candidates(
            running,
            PromptCost(prompt_tokens, best, self._block_size),
            hits,
            known_block=prefix[-1] if prefix else None,
            shares=self._branches.shares(prefix, running),
            variant=variant,
            now_s=now_s,
        )
        busy_s, pressure = self.loads.scale.busy_s, self.pressure.value
        forks = self._branches.forks(prefix)
        common = prices(candidates, busy_s=busy_s, pressure=pressure, forks=forks)
        if self._weigh:
            prompt = PromptFacts(chain, best, self._block_size, prompt_tokens, variant, common)
            for weigh in self._weigh:
                candidates = weigh(prompt, candidates, now_s)
        ranking = self._rank(candidates, rng=self._rng, prices=common)
        return Placement(
            ranking=tuple(ranking),
            chain=tuple(chain),
            best_hit_blocks=best,
            prompt_tokens=prompt_tokens,
            block_size=self._block_size,
            busy_s=busy_s,
            forks=forks,
            pressure=pressure,
            variant=variant,
            known_blocks=self.caches.known(chain, best),
            partial_blocks=self.caches.partial(chain, best),
        )

    def place_batch(self, placement: Placement, running: Sequence[str], now_s: float) -> Placement:
        """Rank replicas for a batch request that was placed before.

        It waits for all other requests and for the batch requests before it.
        """
        again = self.place_chain(
            placement.chain, placement.prompt_tokens, running, now_s, variant=placement.variant
        )
        ids = [candidate.replica_id for candidate in again.ranking]
        ahead_s = self.loads.lane_backlogs_s(ids, now_s)
        candidates = [
            candidate._replace(backlog_s=candidate.backlog_s + lane_s)
            for candidate, lane_s in zip(again.ranking, ahead_s, strict=True)
        ]
        common = prices(candidates, busy_s=again.busy_s, pressure=again.pressure, forks=0.0)
        ranking = self._rank(candidates, rng=self._rng, prices=common)
        return replace(again, ranking=tuple(ranking))

    def _candidates(
        self,
        running: Sequence[str],
        prompt: PromptCost,
        hits: Hits,
        *,
        known_block: Fingerprint | None,
        shares: Sequence[float],
        variant: str,
        now_s: float,
    ) -> list[Candidate]:
        """Return the candidates of a prompt, in the order of `running`.

        Most of the time of a placement is spent here. So the loop passes positional arguments,
        which are faster, and the lists of reloads and setup times are filled only if needed.

        Args:
            hits: the blocks of the prompt that each replica has cached.
            known_block: the last block of the longest hit; None: no replica has a hit.
            shares: Candidate.branch_share of each replica.
        """
        loads = self.loads.of_all(running)
        hit_blocks, free_blocks = hits.blocks, self.replicas.free_blocks
        reloads = [NO_RELOAD] * len(running)
        if hits.reloads:
            reloads = [hits.reloads.get(replica_id, NO_RELOAD) for replica_id in running]
        setup_times_s = [0.0] * len(running)
        if variant:
            setup_times_s = [self._setup_s(replica_id, variant) for replica_id in running]
        has_pressure = self.pressure.value > 0.0  # otherwise no term needs the held share
        candidates = []
        for replica_id, load, (slowness, healthy), share, reload, setup_s in zip(
            running, loads, learned_slowness(loads), shares, reloads, setup_times_s, strict=True
        ):
            blocks = hit_blocks.get(replica_id, 0)
            new_tokens, own_s, copy_s = prompt.on(load.model, blocks)
            candidates.append(
                Candidate(
                    replica_id,
                    blocks,
                    load.backlog_s(slowness, now_s),
                    slowness * own_s,
                    slowness * copy_s,
                    (load.pending_tokens + new_tokens) / load.step_tokens,
                    slowness * load.decode_step_s,
                    free_blocks.get(replica_id, 0),
                    load.unanswered,
                    self._memory_s(load, new_tokens, prompt.tokens, known_block, now_s),
                    setup_s,
                    reload.parts,
                    reload.wait_s,
                    healthy / slowness,
                    share,
                    load.held_share if has_pressure else 0.0,
                )
            )
        return candidates

    def _setup_s(self, replica_id: str, variant: str) -> float:
        """Return the seconds to load the variant; 0 if it is loaded."""
        if variant in self.loads.of(replica_id).variants:
            return 0.0
        return self.replicas.setup_s(replica_id)

    def _memory_s(
        self,
        load: ReplicaLoad,
        new_tokens: int,
        tokens: int,
        known_block: Fingerprint | None,
        now_s: float,
    ) -> float:
        """Return the seconds until the replica's KV cache has space for a prompt.

        This assumes that all tokens that running requests hold are freed at a constant rate within
        half of the mean answer time. They include the tokens of answers, by the engine's report. If
        the engine does not start the prompts in its queue, the prompt is expected to wait at least
        for as long as these have waited.
        """
        if not load.decoding or not load.capacity_tokens:
            return 0.0
        needed = load.kv.needed(
            new_tokens=new_tokens, cached_tokens=tokens - new_tokens, prefix=known_block
        )
        held = max(load.kv.tokens, load.held_tokens)
        missing = needed - load.kv.tokens + held - load.capacity_tokens
        scale = self.loads.scale
        memory_s = scale.answer_s * missing / (2.0 * held) if missing > 0 else 0.0
        if not load.engine_waiting:
            return memory_s
        return max(memory_s, load.stalled_s(now_s, scale.busy_s))

    def recognise(self, placement: Placement, context: RequestContext) -> RequestContext:
        """Return the context of a prompt with its turn, and what features know about the turn."""
        shared_blocks = placement.shared_tokens // placement.block_size
        chain, known_blocks = placement.chain, placement.known_blocks
        turn, earlier = self.turns.find(chain, known_blocks, context.hints, shared_blocks)
        context = replace(context, turn=turn)
        for recognised in self.features.recognised:
            context = recognised(context, turn, earlier)
        return context

    # Dispatches.

    def sent(
        self,
        placement: Placement,
        replica_id: str,
        request_id: str,
        now_s: float,
        context: RequestContext | None = None,
    ) -> Attempt:
        """Count a request that this router sends to a replica.

        The request counts as load of the replica, and its blocks count as cached there, since the
        replica will compute them.

        Args:
            request_id: the request's id at this replica.
            context: what the router knows about the client's call; None: nothing.
        """
        candidate, load = placement.candidate(replica_id), self.loads.of(replica_id)
        turn = context.turn if context else None
        is_batch = context is not None and context.is_in_lane
        hit_tokens = candidate.hit_blocks * self._block_size
        prefill_s = load.model.seconds(hit_tokens, placement.prompt_tokens)
        dispatch = Dispatch(
            request_id=request_id,
            replica_id=replica_id,
            prefill_s=prefill_s + candidate.stopped_s / load.speed.slowness,
            new_tokens=placement.prompt_tokens - hit_tokens,
            prompt_tokens=placement.prompt_tokens,
            known_prefix=Fingerprints(placement.known_prefix[-1:]),
            expected=Fingerprints(
                self.caches.added(replica_id, placement.chain, candidate.gpu_blocks)
            ),
            variant=placement.variant,
            loads_first=candidate.loads_first,
            turn=None if is_batch else turn,
            is_batch=is_batch,
        )
        # A request that is sent again was recorded the first time.
        if turn and not is_batch and not self.turns.knows(turn):
            self.pressure.record(
                computed_tokens=placement.new_tokens, evicted_tokens=placement.evicted_tokens
            )
        reload_s, terms_s = candidate.reload_s, candidate.terms_wait_s
        if candidate.stopped_s:
            reload_s = terms_s = 0.0
        attempt = self.begin(dispatch, now_s, reload_s, terms_s)
        attempt.placement, attempt.observer = placement, self.observer
        attempt.terms = candidate.terms
        attempt.boundaries = self.replicas.layouts.get(replica_id)
        attempt.context = context or attempt.context
        self.observer.sent(attempt)
        return attempt

    def begin(
        self, dispatch: Dispatch, now_s: float, reload_s: float = 0.0, terms_s: float = 0.0
    ) -> Attempt:
        """Count a request that this router or another one has sent to a replica.

        Args:
            reload_s: seconds until its blocks are copied back from slower tiers, such as host
                memory. The engine computes other prompts meanwhile.
            terms_s: seconds that terms of features delay it meanwhile.
        """
        replica_id, loads = dispatch.replica_id, self.loads
        load = loads.lane(replica_id) if dispatch.is_batch else loads.of(replica_id)
        load.send(
            dispatch.request_id,
            PendingRequest(
                prefill_s=dispatch.prefill_s,
                new_tokens=dispatch.new_tokens,
                prompt_tokens=dispatch.prompt_tokens,
                sent_s=now_s,
                variant=dispatch.variant,
                loads_first=dispatch.loads_first,
                reload_s=reload_s,
                terms_s=terms_s,
                prefix=dispatch.known_block,
                blocks=dispatch.expected.blocks if dispatch.is_batch else (),
            ),
        )
        if not dispatch.is_batch:
            fleet = self.mirror.replica_ids | {replica_id}
            self._branches.take(dispatch.known_prefix.blocks, replica_id, fleet)
            self.loads.scale.record_prefill(load.speed.slowness * dispatch.prefill_s)
        self.mirror.forget_computed(now_s)
        self.mirror.expect(replica_id, dispatch.expected.blocks)
        if dispatch.turn:
            self.turns.begin(dispatch.turn)
        attempt = Attempt(
            mirror=self.mirror,
            load=load,
            dispatch=dispatch,
            capacity_blocks=self.replicas.cache_blocks(replica_id),
            sent_s=now_s,
            context=RequestContext(now_s),
            scale=self.loads.scale,
            features=self.features,
        )
        for attempt_began in self.features.attempt_began:
            attempt_began(attempt)
        return attempt

    def end_session(self, session: int) -> None:
        """Record that a client has declared the end of a session."""
        last = self.turns.end(session)
        for session_ended in self.features.session_ended:
            session_ended(session, last)
