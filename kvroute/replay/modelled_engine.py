"""A model of a vLLM replica with chunked prefill, batched decode and a paged prefix cache.

Its scheduler is that of the simulated engine. If a part of a prompt is in a slower tier (host
memory, a disk), its request may wait for a copy of these blocks before it joins the batch. Other
requests run in the meantime. A request whose blocks are pulled from another replica waits in the
same way; the caller models the pull (network.py).
"""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import count, takewhile
from types import MappingProxyType

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import Tier
from kvroute.contract.keep import RetentionHint
from kvroute.contract.records import Load, TierFacts
from kvroute.features.engine_feature import NO_ENGINE_FEATURES, EngineFeatures
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.policies.policy_protocol import LoadReport
from kvroute.replay.steps import Plan, ReplayedRequest, ReplayPool, ReplayTable, StepResult
from kvroute.replay.tier_memory import TierMemory
from kvroute.replay.token_gaps import TokenGaps
from kvroute.replay.workload.trace import BLOCK_TOKENS, Request
from kvroute.replica.modelled.modelled_scheduler import ModelledScheduler, parts_of
from kvroute.replica.modelled.paged_cache import PagedCache

NO_TIERS: Mapping[Tier, TierFacts] = MappingProxyType({})


class ModelledReplica(ModelledScheduler[ReplayedRequest]):
    """A modelled replica. The caller runs the clock.

    The caller calls `arrive` at any time, `end_step` when `plan` ends, and `end_reload` at the
    times in `memory.new_ends_s`.

    Args:
        model: the times of the engine's steps.
        capacity_blocks: size of the KV cache.
        tiers: the replica's slower tiers, the fastest first.
        block_tokens: tokens in a block.
        features: what features do in the engine.
    """

    def __init__(
        self,
        model: EngineModel,
        capacity_blocks: int,
        tiers: Mapping[Tier, TierFacts] = NO_TIERS,
        *,
        block_tokens: int = BLOCK_TOKENS,
        features: EngineFeatures = NO_ENGINE_FEATURES,
    ) -> None:
        self._blocks = ReplayPool(capacity_blocks, block_tokens)
        super().__init__(
            self._blocks,
            step_tokens=model.chunk_tokens,
            max_sequences=model.max_sequences,
            features=features,
        )
        self.hit_tokens: dict[int, int] = {}  # request index -> cached prompt tokens
        # Request index -> tokens from each slower tier.
        self.reloaded_tokens: dict[int, dict[Tier, int]] = {}
        self.reload_wait_s: dict[int, float] = {}  # request index -> seconds of wait for the copy
        # The slower tiers; None: there are none.
        self.memory = TierMemory[ReplayedRequest](tiers, model.prefill) if tiers else None
        self.prefill_s = 0.0  # seconds of prefill since the start
        self.gaps = TokenGaps()
        self.plan: Plan | None = None  # the steps that run now; None: the engine is idle
        self._now_s = 0.0  # time of the caller's latest call
        self._model = model
        # Request without a first token -> its prompt tokens to compute.
        self._pending_tokens: dict[int, int] = {}
        # Waiting requests that need a block which is being copied for another request.
        self._blocked: set[ReplayedRequest] = set()
        self._pulling: dict[int, ReplayedRequest] = {}  # requests that wait for their own pulls
        self._pulled: dict[int, frozenset[Fingerprint]] = {}  # the blocks that they pull
        self._arrivals = count()
        # Heap: a decoding request's last step, its number, the step since which it decodes, and the
        # request. Entries of preempted requests stay until they are the first.
        self._ends: list[tuple[int, int, int, ReplayedRequest]] = []

    @property
    def cache(self) -> PagedCache:
        """Return the blocks in GPU memory."""
        return self._blocks.cache

    def arrive(
        self,
        request: Request,
        now_s: float,
        order_s: float = 0.0,
        new_tokens: int | None = None,
        keep: RetentionHint | None = None,
        is_batch: bool = False,
        pulled: Sequence[Fingerprint] = (),
    ) -> None:
        """Queue a request. If only decodes run, end the plan early, so that it is admitted soon.

        Args:
            request: The request.
            now_s: The current time.
            order_s: Requests are admitted in the order of now_s + order_s.
            new_tokens: Prompt tokens to compute, as the router expects; None: look into the cache.
            keep: Retention hint for the request's blocks.
            is_batch: Whether the request gives way to others.
            pulled: Blocks that the request pulls. It waits until the caller calls `end_pull`.
        """
        self._now_s = now_s
        full = request.input_tokens // request.block_tokens
        arrived = ReplayedRequest(
            now_s,
            now_s + order_s,
            next(self._arrivals),
            request,
            keep or RetentionHint(),
            ReplayTable(request.input_tokens, [*request.blocks[:full]]),
            is_batch,
        )
        self._pending_tokens[request.index] = (
            self._missing_tokens(request) if new_tokens is None else new_tokens
        )
        if pulled:
            self._pulling[request.index] = arrived
            self._pulled[request.index] = frozenset(pulled)
            return
        self.add(arrived)
        if self.plan is None or self.waiting[0] is arrived:
            self._shorten_plan(now_s)

    def end_reload(self, now_s: float) -> None:
        """End the oldest copy from a slower tier, and add its request to the batch."""
        assert self.memory is not None
        self._now_s = now_s
        reload = self.memory.end_reload()
        self._blocks.store(reload.sequence.table, reload.end)
        reload.sequence.computed = reload.end * self._blocks.block_size
        self.join(reload.sequence)
        self._unblock(now_s)

    def held_blocks(self, request: Request) -> int:
        """Return how many leading blocks of a prompt are in one of the replica's memories."""
        hits = sum(1 for _ in takewhile(self.cache.__contains__, request.reusable))
        return hits if self.memory is None else hits + self.memory.hits(request, hits)

    def end_pull(self, request: Request, blocks: int, now_s: float) -> None:
        """End a request's pull. It has brought the prompt's leading blocks, up to this number."""
        assert self.memory is not None
        self._now_s = now_s
        self.memory.store(request.blocks[:blocks])
        del self._pulled[request.index]
        self.add(self._pulling.pop(request.index))
        self._unblock(now_s)

    def _unblock(self, now_s: float) -> None:
        """Let all requests that wait for another request's blocks be admitted."""
        self._blocked.clear()
        self._shorten_plan(now_s)

    def end_step(self) -> StepResult:
        """End the planned steps, start the next steps if there is work, and return the results."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        self._now_s = plan.ends_s
        result = StepResult()
        result.added, result.removed = self._blocks.take_changes()
        for step in range(plan.steps):
            self.gaps.add(plan.first_s + step * plan.growth_s, len(self.decoding))
        self.record_step(plan.first_s, plan.chunks)
        self.advance(plan.steps)
        for each, tokens in plan.chunks.items():
            each.computed += tokens
            self._write_through(each)
            if not each.missing:
                self._answer(each, result)
        self._end_answers(result)
        if self.memory is not None:
            for level in self.memory.levels:
                added, removed = level.take_changes()
                result.added += added
                result.removed += removed
        self._start(plan.ends_s)
        return result

    def _answer(self, sequence: ReplayedRequest, result: StepResult) -> None:
        """Give a request whose tokens are all computed the next token of its answer."""
        request = sequence.request
        if sequence.table.tokens > request.input_tokens:
            self.gaps.add(self._now_s - sequence.preempted_s)
        else:
            result.first_tokens.append(request)
        del self._pending_tokens[request.index]
        sequence.table.tokens += 1
        self.decode(sequence)
        left = request.input_tokens + request.output_tokens - sequence.table.tokens
        heappush(self._ends, (self.steps + left, sequence.number, self.steps, sequence))

    def _end_answers(self, result: StepResult) -> None:
        """Remove the requests whose answers are complete."""
        while (last := self._next_end()) is not None and last <= self.steps:
            ended = heappop(self._ends)[-1]
            self.remove(ended, ended.keep)
            if self.memory is not None:
                self.memory.store(ended.table.hashes)
                self.memory.release(ended.table.hashes, ended.keep)
            result.finished.append(ended.request)

    def _next_end(self) -> int | None:
        """Return the number of the step that ends the next answer; None: nothing decodes."""
        while self._ends:
            last, _, since, first = self._ends[0]
            if first in self.decoding and first.since == since:
                return last
            heappop(self._ends)
        return None

    def report(self) -> LoadReport:
        """Return the replica's report of its load for routers."""
        return LoadReport(
            Load(
                running=self.admitted - self.copying,
                waiting=len(self.waiting) + self.copying + len(self._pulling),
                used_blocks=self._blocks.used_blocks,
            ),
            pending_tokens=sum(self._pending_tokens.values()),
        )

    def _missing_tokens(self, request: Request) -> int:
        """Return how many prompt tokens must be computed, neither reused nor copied from a tier."""
        hits = sum(1 for _ in takewhile(self.cache.__contains__, request.reusable))
        if self.memory is not None:
            hits += sum(part.blocks for part in self.memory.worth_copying(request, hits))
        return request.input_tokens - hits * request.block_tokens

    def _shorten_plan(self, now_s: float) -> None:
        """Start steps, or shorten a plan of several decode steps, since there is a new request."""
        plan = self.plan
        if plan is None:
            self._start(now_s)
        elif plan.steps > 1:
            self.plan = Plan(
                plan.started_s, plan.steps_by(now_s), plan.first_s, plan.growth_s, plan.chunks
            )

    def _start(self, now_s: float) -> None:
        model, before = self._model, self.preemptions
        chunks = self.schedule(self._now_s)
        if not self.decoding and not chunks and self.preemptions > before:
            chunks = self.schedule(self._now_s)  # a step with preemptions admits no requests
        decodes = len(self.decoding)
        prefill_s = sum(model.prefill.seconds(*part) for part in parts_of(chunks))
        self.prefill_s += prefill_s
        if not chunks and not decodes:
            return
        steps = 1
        if not chunks and (last := self._next_end()) is not None:
            steps = self.steps_alike(last - self.steps)
        self.plan = Plan(
            started_s=now_s,
            steps=steps,
            first_s=model.base_s(decodes + len(chunks), decodes + sum(chunks.values()))
            + model.context_token_s * self.context_tokens
            + prefill_s,
            growth_s=model.context_token_s * decodes,
            chunks=chunks,
        )

    def preempted(self, sequence: ReplayedRequest, now_s: float) -> None:
        request, tokens = sequence.request, sequence.table.tokens
        if tokens > max(sequence.known, request.input_tokens):
            sequence.preempted_s = now_s
        sequence.known = tokens
        self._pending_tokens[request.index] = self._missing_tokens(request)

    def expected(self, sequence: ReplayedRequest) -> int:
        return max(0, sequence.table.length - self._pending_tokens[sequence.request.index])

    @property
    def copying(self) -> int:
        return len(self.memory) if self.memory is not None else 0

    def can_admit(self, sequence: ReplayedRequest) -> bool:
        if sequence not in self._blocked and self._is_reloading_block(sequence.request):
            self._blocked.add(sequence)
        return sequence not in self._blocked

    def _is_reloading_block(self, request: Request) -> bool:
        """Return whether another request gets the first block that this one's prefix lacks.

        It copies the block from the slower tier, or pulls it.
        """
        memory = self.memory
        if memory is None or not (self.copying or self._pulling):
            return False
        missing = (block for block in request.reusable if block not in self.cache)
        first = next(missing, None)
        if first is None or memory.is_reloading(first):
            return first is not None
        hits = self.held_blocks(request)
        if hits >= len(request.reusable):
            return False
        block = request.reusable[hits]
        return any(block in pulled for pulled in self._pulled.values())

    def reload(self, sequence: ReplayedRequest, now_s: float) -> bool:
        """Start a copy from a slower tier if that saves time; return whether a copy was started."""
        request = sequence.request
        hits = sequence.computed // request.block_tokens
        parts = [] if self.memory is None else self.memory.worth_copying(request, hits)
        tokens = {part.tier: part.blocks * request.block_tokens for part in parts}
        self.hit_tokens.setdefault(request.index, sequence.computed + sum(tokens.values()))
        if self.memory is None or not parts:
            return False
        self._blocks.hold(sequence.table, sum(part.blocks for part in parts))
        ends_s = self.memory.reload(sequence, request, hits, parts, now_s)
        self.reloaded_tokens[request.index] = tokens
        self.reload_wait_s[request.index] = ends_s - now_s
        return True

    def _write_through(self, sequence: ReplayedRequest) -> None:
        """Copy the sequence's computed blocks to the slower tier, as far as there is space."""
        if self.memory is not None:
            request = sequence.request
            self.memory.store(request.blocks[: sequence.computed // request.block_tokens])
