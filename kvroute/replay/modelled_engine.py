"""A model of a vLLM replica with chunked prefill, batched decode and a paged prefix cache.

running_batch.py says when requests are admitted and preempted. Batch requests give way to others by
the rules in contract/priority.py. If a part of a prompt is in a slower tier (host memory, a disk),
its request may wait for a copy of these blocks before it joins the batch. Other requests run in the
meantime. A request whose blocks are pulled from another replica waits in the same way; the caller
models the pull (network.py).
"""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import count, takewhile
from types import MappingProxyType

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import Tier
from kvroute.contract.keep import RetentionHint
from kvroute.contract.priority import lane_tokens
from kvroute.contract.records import Load, TierFacts
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.policies.policy_protocol import LoadReport
from kvroute.replay.running_batch import RunningBatch
from kvroute.replay.steps import Plan, Running, StepResult, WaitingPrompt
from kvroute.replay.tier_memory import TierMemory
from kvroute.replay.token_gaps import TokenGaps
from kvroute.replay.workload.trace import BLOCK_TOKENS, Request
from kvroute.replica.sim_engine.paged_cache import PagedCache

Chunks = dict[Running, int]  # request -> its tokens that a step computes
NO_TIERS: Mapping[Tier, TierFacts] = MappingProxyType({})


class ModelledReplica:
    """A modelled replica. The caller runs the clock.

    The caller calls `arrive` at any time, `end_step` when `plan` ends, and `end_reload` at the
    times in `memory.new_ends_s`.

    Args:
        model: the times of the engine's steps.
        capacity_blocks: size of the KV cache.
        tiers: the replica's slower tiers, the fastest first.
        block_tokens: tokens in a block.
    """

    def __init__(
        self,
        model: EngineModel,
        capacity_blocks: int,
        tiers: Mapping[Tier, TierFacts] = NO_TIERS,
        *,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.cache = PagedCache(capacity_blocks, self._evicted)
        self.hit_tokens: dict[int, int] = {}  # request index -> cached prompt tokens
        # Request index -> tokens from each slower tier.
        self.reloaded_tokens: dict[int, dict[Tier, int]] = {}
        self.reload_wait_s: dict[int, float] = {}  # request index -> seconds of wait for the copy
        # The slower tiers; None: there are none.
        self.memory = TierMemory[Running](tiers, model.prefill) if tiers else None
        self.prefill_s = 0.0  # seconds of prefill since the start
        self.gaps = TokenGaps()
        self._now_s = 0.0  # time of the caller's latest call
        self.plan: Plan | None = None  # the steps that run now; None: the engine is idle
        self._model = model
        self._capacity_blocks = capacity_blocks
        # Request without a first token -> its prompt tokens to compute.
        self._pending_tokens: dict[int, int] = {}
        self._waiting: list[WaitingPrompt] = []  # heap of the requests that are not admitted yet
        # Requests that need a block which is being copied for another request.
        self._blocked: list[WaitingPrompt] = []
        self._pulling: dict[int, WaitingPrompt] = {}  # requests that wait for their own pulls
        self._pulled: dict[int, frozenset[Fingerprint]] = {}  # the blocks that they pull
        self.batch = RunningBatch(self.cache, block_tokens, int(model.watermark * capacity_blocks))
        self._in_lane = 0  # admitted requests that are in the batch lane
        self._arrivals = count()
        self._removed: list[Fingerprint] = []  # blocks evicted since the end of the last step

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
        waiting = WaitingPrompt(
            now_s + order_s, next(self._arrivals), request, keep or RetentionHint(), is_batch
        )
        self._pending_tokens[request.index] = (
            self._missing_tokens(request) if new_tokens is None else new_tokens
        )
        if pulled:
            self._pulling[request.index] = waiting
            self._pulled[request.index] = frozenset(pulled)
            return
        heappush(self._waiting, waiting)
        if self.plan is None or self._waiting[0].request is request:
            self._shorten_plan(now_s)

    def end_reload(self, now_s: float) -> None:
        """End the oldest copy from a slower tier, and add its request to the batch."""
        assert self.memory is not None
        self._now_s = now_s
        reload = self.memory.end_reload()
        sequence = reload.sequence
        self.batch.store(sequence, reload.end)
        sequence.computed = reload.end * sequence.request.block_tokens
        self.batch.prefilling.append(sequence)
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
        heappush(self._waiting, self._pulling.pop(request.index))
        self._unblock(now_s)

    def _unblock(self, now_s: float) -> None:
        """Let all requests that wait for another request's blocks be admitted."""
        while self._blocked:
            heappush(self._waiting, self._blocked.pop())
        self._shorten_plan(now_s)

    def end_step(self) -> StepResult:
        """End the planned steps, start the next steps if there is work, and return the results."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        self._now_s = plan.ends_s
        batch = self.batch
        result = StepResult(added=[*batch.added], removed=self._removed)
        batch.added.clear()
        self._removed = []
        for step in range(plan.steps):
            self.gaps.add(plan.first_s + step * plan.growth_s, len(batch.decoding))
        batch.advance(plan.steps)
        for sequence, tokens in plan.chunks.items():
            sequence.computed += tokens
            self._write_through(sequence)
            if not sequence.missing:
                batch.prefilling.remove(sequence)
                batch.decode(sequence)
                del self._pending_tokens[sequence.request.index]
                if sequence.waited.generated:
                    self.gaps.add(plan.ends_s - sequence.waited.preempted_s)
                else:
                    result.first_tokens.append(sequence.request)
        for sequence in batch.pop_ended():
            self._release(sequence)
            result.finished.append(sequence.request)
        if self.memory is not None:
            for level in self.memory.levels:
                added, removed = level.take_changes()
                result.added += added
                result.removed += removed
        self._start(plan.ends_s)
        return result

    def report(self) -> LoadReport:
        """Return the replica's report of its load for routers."""
        used_blocks = self._capacity_blocks - len(self.cache.free)
        return LoadReport(
            Load(running=len(self.batch), waiting=self._queued, used_blocks=used_blocks),
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
        model, batch = self._model, self.batch
        before = batch.preemptions
        chunks = self._schedule()
        if not batch.decoding and not chunks and batch.preemptions > before:
            chunks = self._schedule()  # a step with preemptions admits no requests
        decodes = len(batch.decoding)
        prefill_s = sum(
            model.prefill.seconds(sequence.computed, sequence.computed + tokens)
            for sequence, tokens in chunks.items()
        )
        self.prefill_s += prefill_s
        if not chunks and not decodes:
            return
        self.plan = Plan(
            started_s=now_s,
            steps=1 if chunks else batch.steps_alike(),
            first_s=model.base_s(decodes + len(chunks), decodes + sum(chunks.values()))
            + model.context_token_s * batch.context_tokens
            + prefill_s,
            growth_s=model.context_token_s * decodes,
            chunks=chunks,
        )

    def _schedule(self) -> Chunks:
        """Choose the prompt tokens of the next step, and allocate all blocks that it needs."""
        self._make_space()
        batch, before = self.batch, self.batch.preemptions
        while not batch.can_grow():
            self._preempt()
        batch.grow()
        chunks: Chunks = {}
        in_lane = [each for each in batch.prefilling if each.is_in_lane]
        others = [each for each in batch.prefilling if not each.is_in_lane]
        budget = self._continue(others, self._model.chunk_tokens - len(batch.decoding), chunks)
        if batch.preemptions == before:
            budget = self._admit_waiting(budget, chunks, lane=False)
        is_blocked = bool(self._waiting) and not self._waiting[0].is_in_lane(self._now_s)
        if self._sequences > self._in_lane or is_blocked:
            budget = 0 if chunks else min(budget, lane_tokens(self._model.chunk_tokens))
        budget = self._continue(in_lane, budget, chunks)
        if not is_blocked and batch.preemptions == before:
            self._admit_waiting(budget, chunks, lane=True)
        return chunks

    def _make_space(self) -> None:
        """Preempt batch requests while the first other request that waits lacks blocks."""
        if not self._in_lane or not self._waiting or self._waiting[0].is_in_lane(self._now_s):
            return
        while (last := self.batch.last) and last.is_in_lane:
            if self.batch.has_space(self._waiting[0]):
                return
            self._preempt()

    def _continue(self, sequences: Sequence[Running], budget: int, chunks: Chunks) -> int:
        """Compute tokens of admitted prompts in their order, and return the remaining budget."""
        for sequence in sequences:
            tokens = min(budget, sequence.missing)
            if tokens <= 0:
                break
            while sequence in self.batch.prefilling:
                if self.batch.extend(sequence, sequence.computed + tokens):
                    chunks[sequence] = tokens
                    budget -= tokens
                    break
                budget += chunks.pop(self._preempt(), 0)
        return budget

    def _admit_waiting(self, budget: int, chunks: Chunks, *, lane: bool) -> int:
        """Admit waiting requests while they are in the batch lane, or while they are not.

        Args:
            budget: Tokens that the step has left for them.
            chunks: The prompt tokens of the step; those of admitted requests are added.
            lane: Whether to admit requests of the batch lane.

        Returns:
            The remaining budget.
        """
        while budget > 0 and self._waiting and self._sequences < self._model.max_sequences:
            waiting = self._waiting[0]
            if waiting.is_in_lane(self._now_s) != lane:
                break
            if self._is_reloading_block(waiting.request):
                self._blocked.append(heappop(self._waiting))
                continue
            admitted = self.batch.admit(waiting, is_alone=not self._sequences, now_s=self._now_s)
            if admitted is None:
                break
            heappop(self._waiting)
            self._in_lane += lane
            if not self._reload(admitted):
                self.batch.prefilling.append(admitted)
                budget = self._continue([admitted], budget, chunks)
        return budget

    def _preempt(self) -> Running:
        """Preempt the running request that is last in order, and return it.

        Its prompt and its answer so far are computed again, as far as they are not cached then.
        """
        last = self.batch.preempt()
        self._in_lane -= last.is_in_lane
        heappush(self._waiting, last.preempted(self._now_s))
        self._pending_tokens[last.request.index] = self._missing_tokens(last.request)
        return last

    def _is_reloading_block(self, request: Request) -> bool:
        """Return whether another request gets the first block that this one's prefix lacks.

        It copies the block from the slower tier, or pulls it.
        """
        memory = self.memory
        if memory is None or not (self._reloading or self._pulling):
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

    def _reload(self, admitted: Running) -> bool:
        """Start a copy from a slower tier if that saves time; return whether a copy was started."""
        request = admitted.request
        hits = admitted.computed // request.block_tokens
        parts = [] if self.memory is None else self.memory.worth_copying(request, hits)
        tokens = {part.tier: part.blocks * request.block_tokens for part in parts}
        self.hit_tokens.setdefault(request.index, admitted.computed + sum(tokens.values()))
        if self.memory is None or not parts:
            return False
        self.batch.hold(admitted, sum(part.blocks for part in parts))
        ends_s = self.memory.reload(admitted, request, hits, parts, self._now_s)
        self.reloaded_tokens[request.index] = tokens
        self.reload_wait_s[request.index] = ends_s - self._now_s
        return True

    def _release(self, sequence: Running) -> None:
        """Free all blocks of a sequence whose answer is complete."""
        self._in_lane -= sequence.is_in_lane
        keep = sequence.waited.keep
        self.cache.release(sequence.blocks, keep)
        if self.memory is not None:
            self.memory.store(sequence.hashes)
            self.memory.release(sequence.hashes, keep)

    def _write_through(self, sequence: Running) -> None:
        """Copy the sequence's computed blocks to the slower tier, as far as there is space."""
        if self.memory is not None:
            request = sequence.request
            self.memory.store(request.blocks[: sequence.computed // request.block_tokens])

    def _evicted(self, hash_: Fingerprint) -> None:
        """Record an evicted block, unless it is an answer's or another copy of it is cached."""
        if hash_ < 0 or hash_ in self.cache:
            return
        if hash_ in self.batch.added:  # routers do not know it yet
            del self.batch.added[hash_]
        else:
            self._removed.append(hash_)

    @property
    def _reloading(self) -> int:
        return len(self.memory) if self.memory is not None else 0

    @property
    def _sequences(self) -> int:
        """Return the number of sequences that hold blocks."""
        return len(self.batch) + self._reloading

    @property
    def _queued(self) -> int:
        return len(self._waiting) + len(self._blocked) + self._reloading + len(self._pulling)
