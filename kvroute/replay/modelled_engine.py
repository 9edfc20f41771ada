"""A model of a vLLM replica: chunked prefill, batched decode, a paged prefix cache.

An admitted request reserves blocks for its whole response, so no request is preempted. A request
may wait for a copy of blocks from a slower tier before it joins the batch; others run meanwhile.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, takewhile
from types import MappingProxyType

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import Tier
from kvroute.contract.keep import RetentionHint
from kvroute.contract.records import Load, TierFacts
from kvroute.replay.hardware.model import EngineModel
from kvroute.replay.policies.protocol import LoadReport
from kvroute.replay.tier_memory import TierMemory
from kvroute.replay.workload.trace import Request
from kvroute.replica.sim_engine.paged_cache import PagedCache


@dataclass(slots=True, eq=False)
class Running:
    """A request in the engine."""

    request: Request
    computed: int  # number of prompt tokens in the cache, hits included
    blocks: list[int]  # cache blocks of the prompt and its answer
    keep: RetentionHint


@dataclass(slots=True)
class StepResult:
    """The visible results of a step at its end."""

    first_tokens: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    added: list[Fingerprint] = field(default_factory=list)
    removed: list[Fingerprint] = field(default_factory=list)  # removed before `added` was added


def blocks_needed(request: Request) -> int:
    """Return the number of KV blocks that a request holds at its end."""
    return -(-(request.input_tokens + request.output_tokens) // request.block_tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """The scheduled steps: one step with prefill, or several steps of decodes only."""

    started_s: float
    steps: int
    first_s: float  # duration of the first step
    growth_s: float  # time by which each step takes longer than the step before
    chunks: Sequence[tuple[Running, int]] = ()  # sequence, prompt tokens that the step computes

    @property
    def ends_s(self) -> float:
        k = self.steps
        return self.started_s + k * self.first_s + self.growth_s * k * (k - 1) / 2

    def steps_by(self, now_s: float) -> int:
        """Return the number of steps that have started by that time, at least one."""
        past_s = now_s - self.started_s
        linear_s = self.first_s - self.growth_s / 2
        # the root of  growth/2 k^2 + linear k = past, in the form that allows growth = 0
        root = 2 * past_s / (linear_s + math.sqrt(linear_s**2 + 2 * self.growth_s * past_s))
        return min(self.steps, max(1, math.ceil(root)))


Waiting = tuple[
    float, int, Request, RetentionHint
]  # order time, number of arrival, request, its hint


NO_TIERS: Mapping[Tier, TierFacts] = MappingProxyType({})


class ModelledReplica:
    """A modelled replica, which the caller drives.

    The caller calls `arrive` at any time, `end_step` at the end of the plan, and `end_reload` at
    the times in `memory.begun_s`.

    Args:
        tiers: the replica's slower tiers; at most one is modelled.
    """

    def __init__(
        self, model: EngineModel, capacity_blocks: int, tiers: Mapping[Tier, TierFacts] = NO_TIERS
    ) -> None:
        self.cache = PagedCache(capacity_blocks, self._evicted)
        self.hit_tokens: dict[int, int] = {}  # request index -> cached prompt tokens
        self.reloaded_tokens: dict[int, int] = {}  # request index -> tokens from a slower tier
        self.reload_wait_s: dict[int, float] = {}  # request index -> seconds of wait for their copy
        self.memory: TierMemory[Running] | None = None
        for tier, facts in tiers.items():
            self.memory = TierMemory(tier, facts, model.prefill)
        self.prefill_s = 0.0  # seconds spent on prompts so far
        self._now_s = 0.0  # time of the last call
        self.plan: Plan | None = None
        self._model = model
        self._capacity_blocks = capacity_blocks
        self._pending_tokens: dict[int, int] = {}  # request without first token -> tokens
        self._waiting: list[Waiting] = []  # heap
        self._behind: list[Waiting] = []  # their blocks are being copied for another request
        self._prefilling: list[Running] = []
        self._decoding: list[tuple[int, int, Running]] = []  # heap: last step, index
        self._arrivals = count()
        self._steps = 0
        self._context_tokens = 0  # context tokens of all decodes together
        self._added: list[Fingerprint] = []  # blocks cached since the last step ended
        self._removed: list[Fingerprint] = []
        self._answers = 0  # hashes of responses' blocks are negative: no request matches them

    def arrive(
        self,
        request: Request,
        now_s: float,
        order_s: float = 0.0,
        new_tokens: int | None = None,
        keep: RetentionHint | None = None,
    ) -> None:
        """Queue a request, and shorten planned decode steps so that it can be admitted.

        Args:
            request: The request.
            now_s: Present time.
            order_s: Requests are admitted in the order of now_s + order_s.
            new_tokens: Prompt tokens to compute, as the router expects; None: by the cache.
            keep: Retention hint for its blocks.
        """
        self._now_s = now_s
        heappush(
            self._waiting, (now_s + order_s, next(self._arrivals), request, keep or RetentionHint())
        )
        self._pending_tokens[request.index] = (
            self._missing_tokens(request) if new_tokens is None else new_tokens
        )
        if self.plan is None or self._waiting[0][2] is request:
            self._shorten_plan(now_s)

    def end_reload(self, now_s: float) -> None:
        """End the first copy from a slower tier: its request joins the batch."""
        assert self.memory is not None
        self._now_s = now_s
        reload = self.memory.end_reload()
        sequence = reload.sequence
        end = reload.end * sequence.request.block_tokens
        self._fill(sequence, sequence.computed, end)
        sequence.computed = end
        self._prefilling.append(sequence)
        while self._behind:
            heappush(self._waiting, self._behind.pop())
        self._shorten_plan(now_s)

    def end_step(self) -> StepResult:
        """End the planned steps, start the next ones if there is work, and return the results."""
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
            added, removed = self.memory.take_changes()
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
                result.first_tokens.append(sequence.request)
                del self._pending_tokens[sequence.request.index]

    def _end_answers(self, result: StepResult) -> None:
        while self._decoding and self._decoding[0][0] <= self._steps:
            sequence = heappop(self._decoding)[2]
            request = sequence.request
            self._context_tokens -= request.input_tokens + request.output_tokens
            self._release(sequence)
            result.finished.append(request)

    def report(self) -> LoadReport:
        used_blocks = self._capacity_blocks - len(self.cache.free)
        return LoadReport(
            Load(running=self._running, waiting=self._queued, used_blocks=used_blocks),
            pending_tokens=sum(self._pending_tokens.values()),
        )

    def _missing_tokens(self, request: Request) -> int:
        """Return the number of prompt tokens that neither cache holds now."""
        hits = sum(1 for _ in takewhile(self.cache.__contains__, request.reusable))
        if self.memory is not None:
            hits += self.memory.worth(request, hits)
        return request.input_tokens - hits * request.block_tokens

    def _decode(self, sequence: Running) -> None:
        request = sequence.request
        self._context_tokens += request.input_tokens + 1
        last_step = self._steps + request.output_tokens - 1
        heappush(self._decoding, (last_step, request.index, sequence))

    def _shorten_plan(self, now_s: float) -> None:
        """Start new steps, or shorten planned decode steps, because there is more to run."""
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
        """Return the prompt tokens of the next step, first come, first served."""
        chunks: list[tuple[Running, int]] = []
        for sequence in self._prefilling:
            budget -= self._chunk(sequence, budget, chunks)
        while budget > 0 and self._waiting and self._sequences < self._model.max_sequences:
            request, keep = self._waiting[0][2:]
            if self._is_coming(request):
                self._behind.append(heappop(self._waiting))
                continue
            admitted = self._admit(request, keep)
            if admitted is None:
                break
            heappop(self._waiting)
            if not self._reload(admitted):
                self._prefilling.append(admitted)
                budget -= self._chunk(admitted, budget, chunks)
        return chunks

    def _is_coming(self, request: Request) -> bool:
        """Return whether its first missing block is being copied for another request."""
        if self.memory is None or not self._reloading:
            return False
        missing = (block for block in request.reusable if block not in self.cache)
        first = next(missing, None)
        return first is not None and self.memory.is_coming(first)

    def _reload(self, admitted: Running) -> bool:
        """Start a copy from a slower tier if it is worth it, and return whether one started."""
        request = admitted.request
        hits = admitted.computed // request.block_tokens
        blocks = 0 if self.memory is None else self.memory.worth(request, hits)
        self.hit_tokens[request.index] = (hits + blocks) * request.block_tokens
        if self.memory is None or not blocks:
            return False
        ends_s = self.memory.reload(admitted, request, hits, blocks, self._now_s)
        self.reloaded_tokens[request.index] = blocks * request.block_tokens
        self.reload_wait_s[request.index] = ends_s - self._now_s
        return True

    def _chunk(self, sequence: Running, budget: int, chunks: list[tuple[Running, int]]) -> int:
        """Schedule prompt tokens, and return their number.

        As in vLLM, their blocks are cached at once, so another request in the same step can reuse
        them.
        """
        tokens = min(budget, sequence.request.input_tokens - sequence.computed)
        if tokens <= 0:
            return 0
        start = sequence.computed
        self._fill(sequence, start, start + tokens)
        chunks.append((sequence, tokens))
        return tokens

    def _admit(self, request: Request, keep: RetentionHint) -> Running | None:
        """Reserve blocks for prompt and response; return None if too few are free."""
        needed = blocks_needed(request)
        hits = self.cache.admit(request.reusable, needed)
        if hits is None:
            return None
        tokens = len(hits) * request.block_tokens
        blocks = hits + self.cache.take(needed - len(hits))
        return Running(request, tokens, blocks, keep)

    def _fill(self, sequence: Running, start: int, end: int) -> None:
        """Cache the prompt's blocks that become full between two lengths."""
        request = sequence.request
        full = slice(start // request.block_tokens, end // request.block_tokens)
        for block, hash_ in zip(sequence.blocks[full], request.blocks[full], strict=False):
            if hash_ not in self.cache:
                self._added.append(hash_)
            self.cache.store(block, hash_)

    def _release(self, sequence: Running) -> None:
        """Cache its full blocks, including the answer's, and free all its blocks."""
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
        """Write its computed blocks to the slower tier, as far as there is room."""
        if self.memory is not None:
            request = sequence.request
            self.memory.store(request.blocks[: sequence.computed // request.block_tokens])

    def _evicted(self, hash_: Fingerprint) -> None:
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
        """Return the number of sequences that hold blocks."""
        return self._running + self._reloading

    @property
    def _queued(self) -> int:
        return len(self._waiting) + len(self._behind) + self._reloading
