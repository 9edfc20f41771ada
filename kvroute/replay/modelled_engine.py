"""A model of a vLLM replica with chunked prefill, batched decode and a paged prefix cache.

A request reserves the blocks for its whole answer when it is admitted, so no request is preempted.
The exceptions are batch requests, which give way to others by the rules in contract/priority.py.
If a part of a prompt is in a slower tier (host memory, a disk), its request may wait for a copy of
these blocks before it joins the batch. Other requests run in the meantime. A request whose blocks
are pulled from another replica waits in the same way; the caller models the pull (network.py).
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import count, takewhile
from types import MappingProxyType

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import Tier
from kvroute.contract.keep import RetentionHint
from kvroute.contract.priority import lane_tokens
from kvroute.contract.records import Load, TierFacts
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.policies.policy_protocol import LoadReport
from kvroute.replay.steps import Plan, Running, StepResult, WaitingPrompt, blocks_needed
from kvroute.replay.tier_memory import TierMemory
from kvroute.replay.workload.trace import Request
from kvroute.replica.sim_engine.paged_cache import PagedCache

NO_TIERS: Mapping[Tier, TierFacts] = MappingProxyType({})


class ModelledReplica:
    """A modelled replica. The caller runs the clock.

    The caller calls `arrive` at any time, `end_step` when `plan` ends, and `end_reload` at the
    times in `memory.new_ends_s`.

    Args:
        model: the times of the engine's steps.
        capacity_blocks: size of the KV cache.
        tiers: the replica's slower tiers, the fastest first.
    """

    def __init__(
        self, model: EngineModel, capacity_blocks: int, tiers: Mapping[Tier, TierFacts] = NO_TIERS
    ) -> None:
        self.cache = PagedCache(capacity_blocks, self._evicted)
        self.hit_tokens: dict[int, int] = {}  # request index -> cached prompt tokens
        # Request index -> tokens from each slower tier.
        self.reloaded_tokens: dict[int, dict[Tier, int]] = {}
        self.reload_wait_s: dict[int, float] = {}  # request index -> seconds of wait for the copy
        # The slower tiers; None: there are none.
        self.memory = TierMemory[Running](tiers, model.prefill) if tiers else None
        self.prefill_s = 0.0  # seconds of prefill since the start
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
        self._prefilling: list[Running] = []
        # Heap: number of the last step, index of the request, sequence.
        self._decoding: list[tuple[int, int, Running]] = []
        self._others = 0  # admitted requests that are not in the batch lane
        self._arrivals = count()
        self._steps = 0  # number of steps since the start
        self._context_tokens = 0  # sum of the context tokens of all decodes
        self._added: list[Fingerprint] = []  # blocks cached since the end of the last step
        self._removed: list[Fingerprint] = []  # blocks evicted since then
        # Blocks of answers have the fingerprints -1, -2 and so on, which no prompt has. This is the
        # latest one.
        self._answers = 0

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
        end = reload.end * sequence.request.block_tokens
        self._fill(sequence, sequence.computed, end)
        sequence.computed = end
        self._prefilling.append(sequence)
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
        result = StepResult(added=self._added, removed=self._removed)
        self._added, self._removed = [], []
        self._steps += plan.steps
        self._context_tokens += plan.steps * len(self._decoding)
        self._end_chunks(plan, result)
        self._end_answers(result)
        if self.memory is not None:
            for level in self.memory.levels:
                added, removed = level.take_changes()
                result.added += added
                result.removed += removed
        self._start(plan.ends_s)
        return result

    def _end_chunks(self, plan: Plan, result: StepResult) -> None:
        for sequence, tokens in plan.chunks:
            sequence.computed += tokens
            self._write_through(sequence)
            if sequence.computed == sequence.request.input_tokens:
                self._prefilling.remove(sequence)
                self._decode(sequence)
                del self._pending_tokens[sequence.request.index]
                if not sequence.waited.generated:
                    result.first_tokens.append(sequence.request)

    def _end_answers(self, result: StepResult) -> None:
        while self._decoding and self._decoding[0][0] <= self._steps:
            sequence = heappop(self._decoding)[2]
            request = sequence.request
            self._context_tokens -= request.input_tokens + request.output_tokens
            self._release(sequence)
            self._others -= not sequence.is_in_lane
            result.finished.append(request)

    def report(self) -> LoadReport:
        """Return the replica's report of its load for routers."""
        used_blocks = self._capacity_blocks - len(self.cache.free)
        return LoadReport(
            Load(running=self._running, waiting=self._queued, used_blocks=used_blocks),
            pending_tokens=sum(self._pending_tokens.values()),
        )

    def _missing_tokens(self, request: Request) -> int:
        """Return how many prompt tokens must be computed, neither reused nor copied from a tier."""
        hits = sum(1 for _ in takewhile(self.cache.__contains__, request.reusable))
        if self.memory is not None:
            hits += sum(part.blocks for part in self.memory.worth_copying(request, hits))
        return request.input_tokens - hits * request.block_tokens

    def _decode(self, sequence: Running) -> None:
        request, generated = sequence.request, sequence.waited.generated
        self._context_tokens += request.input_tokens + 1 + generated
        last_step = self._steps + request.output_tokens - 1 - generated
        heappush(self._decoding, (last_step, request.index, sequence))

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
        model, decodes = self._model, len(self._decoding)
        chunks = self._chunks(model.chunk_tokens - decodes)
        prefill_s = sum(
            model.prefill.seconds(sequence.computed, sequence.computed + tokens)
            for sequence, tokens in chunks
        )
        self.prefill_s += prefill_s
        if not chunks and not decodes:
            return
        self.plan = Plan(
            started_s=now_s,
            steps=1 if chunks else self._decoding[0][0] - self._steps,
            first_s=model.step_s
            + model.sequence_s * (decodes + len(chunks))
            + model.context_token_s * self._context_tokens
            + prefill_s,
            growth_s=model.context_token_s * decodes,
            chunks=chunks,
        )

    def _chunks(self, budget: int) -> list[tuple[Running, int]]:
        """Admit waiting requests in their order, and choose the prompt tokens of the next step."""
        chunks: list[tuple[Running, int]] = []
        for sequence in self._prefilling:
            if not sequence.is_in_lane:
                budget -= self._chunk(sequence, budget, chunks)
        budget = self._admit_waiting(budget, chunks, lane=False)
        is_blocked = bool(self._waiting) and not self._waiting[0].is_in_lane(self._now_s)
        if self._others or is_blocked:
            budget = 0 if chunks else min(budget, lane_tokens(self._model.chunk_tokens))
        for sequence in self._prefilling:
            if sequence.is_in_lane:
                budget -= self._chunk(sequence, budget, chunks)
        if not is_blocked:
            self._admit_waiting(budget, chunks, lane=True)
        return chunks

    def _admit_waiting(self, budget: int, chunks: list[tuple[Running, int]], *, lane: bool) -> int:
        """Admit waiting requests while they are in the batch lane, or while they are not.

        Args:
            budget: Tokens that the step has left for them.
            chunks: The prompt tokens of the step; those of admitted requests are added.
            lane: Whether to admit requests of the batch lane.

        Returns:
            The remaining budget.
        """
        while budget > 0 and self._waiting and self._sequences < self._model.max_sequences:
            if self._waiting[0].is_in_lane(self._now_s) != lane:
                break
            waiting = heappop(self._waiting)
            if self._is_reloading_block(waiting.request):
                self._blocked.append(waiting)
                continue
            admitted = self._admit(waiting)
            while admitted is None and not lane and self._preempt_last():
                admitted = self._admit(waiting)
            if admitted is None:
                heappush(self._waiting, waiting)
                break
            self._others += not lane
            if not self._reload(admitted):
                self._prefilling.append(admitted)
                budget -= self._chunk(admitted, budget, chunks)
        return budget

    def _preempt_last(self) -> bool:
        """Preempt the batch request that is last in order; return False if there is none.

        Its prompt is computed again, as far as it is not cached then.
        """
        decoding = (sequence for *_, sequence in self._decoding)
        in_lane = [each for each in (*self._prefilling, *decoding) if each.is_in_lane]
        if not in_lane:
            return False
        last = max(in_lane, key=lambda sequence: sequence.waited[:2])
        request, waited = last.request, last.waited
        if last in self._prefilling:
            self._prefilling.remove(last)
        else:  # its answer continues later
            entry = next(entry for entry in self._decoding if entry[2] is last)
            self._decoding.remove(entry)
            heapify(self._decoding)
            generated = request.output_tokens - (entry[0] - self._steps)
            self._context_tokens -= request.input_tokens + generated
            waited = waited._replace(generated=generated)
        self.cache.release(last.blocks)
        heappush(self._waiting, waited)
        self._pending_tokens[request.index] = self._missing_tokens(request)
        return True

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
        self.hit_tokens[request.index] = admitted.computed + sum(tokens.values())
        if self.memory is None or not parts:
            return False
        ends_s = self.memory.reload(admitted, request, hits, parts, self._now_s)
        self.reloaded_tokens[request.index] = tokens
        self.reload_wait_s[request.index] = ends_s - self._now_s
        return True

    def _chunk(self, sequence: Running, budget: int, chunks: list[tuple[Running, int]]) -> int:
        """Schedule prompt tokens of a sequence, and return their number.

        As in vLLM, the blocks are cached at once, so that another request in the same step can
        reuse them.
        """
        tokens = min(budget, sequence.request.input_tokens - sequence.computed)
        if tokens <= 0:
            return 0
        start = sequence.computed
        self._fill(sequence, start, start + tokens)
        chunks.append((sequence, tokens))
        return tokens

    def _admit(self, waiting: WaitingPrompt) -> Running | None:
        """Admit a request and reserve its blocks; return None if too few blocks are free."""
        request = waiting.request
        needed = blocks_needed(request)
        hits = self.cache.admit(request.reusable, needed)
        if hits is None:
            return None
        tokens = len(hits) * request.block_tokens
        blocks = hits + self.cache.take(needed - len(hits))
        in_lane = waiting.is_in_lane(self._now_s)
        return Running(request, tokens, blocks, waiting.keep, waiting, in_lane)

    def _fill(self, sequence: Running, start: int, end: int) -> None:
        """Cache the blocks that become full when the prompt grows from `start` to `end` tokens."""
        request = sequence.request
        full = slice(start // request.block_tokens, end // request.block_tokens)
        for block, hash_ in zip(sequence.blocks[full], request.blocks[full], strict=False):
            if hash_ not in self.cache:
                self._added.append(hash_)
            self.cache.store(block, hash_)

    def _release(self, sequence: Running) -> None:
        """Cache the full blocks of prompt and answer, and free all blocks of the sequence."""
        request, size = sequence.request, sequence.request.block_tokens
        full = (request.input_tokens + request.output_tokens) // size
        answer: list[Fingerprint] = []
        for block in sequence.blocks[request.input_tokens // size : full]:
            self._answers -= 1
            answer.append(Fingerprint(self._answers))
            self.cache.store(block, answer[-1])
        self.cache.release(sequence.blocks, sequence.keep)
        if self.memory is not None:
            blocks = [*request.blocks, *answer]
            self.memory.store(blocks)
            self.memory.release(blocks, sequence.keep)

    def _write_through(self, sequence: Running) -> None:
        """Copy the sequence's computed blocks to the slower tier, as far as there is space."""
        if self.memory is not None:
            request = sequence.request
            self.memory.store(request.blocks[: sequence.computed // request.block_tokens])

    def _evicted(self, hash_: Fingerprint) -> None:
        """Record an evicted block, unless it is an answer's or another copy of it is cached."""
        if hash_ >= 0 and hash_ not in self.cache:
            self._removed.append(hash_)

    @property
    def _running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def _reloading(self) -> int:
        return len(self.memory) if self.memory is not None else 0

    @property
    def _sequences(self) -> int:
        """Return the number of sequences that have reserved blocks."""
        return self._running + self._reloading

    @property
    def _queued(self) -> int:
        return len(self._waiting) + len(self._blocked) + self._reloading + len(self._pulling)
