"""A vLLM-like replica in modelled time: chunked prefill, batched decode, a paged LRU prefix cache.

A prompt reserves room for its answer when
it is admitted, so nothing is preempted.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from replica.kvindex.fingerprint import Fingerprint
from router.replay.model import EngineModel
from router.replay.trace import Request


@dataclass(slots=True, eq=False)
class Running:
    """A request in the engine."""

    request: Request
    hit_tokens: int
    computed: int  # prompt tokens in the cache, hits included
    held: list[Fingerprint]  # cached blocks that it holds, in order
    unnamed: int  # blocks that it holds besides, not cached under any id


@dataclass(slots=True)
class StepResult:
    """What the world sees of a step when it ends."""

    first_tokens: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    added: list[Fingerprint] = field(default_factory=list)
    removed: list[Fingerprint] = field(default_factory=list)  # before `added`


class PrefixCache:
    """Blocks are held, idle (reusable until evicted) or blank.

    Only one block is cached under an id; a second copy, computed at the same time, stays unnamed.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._blank = capacity_blocks
        self._holders: dict[Fingerprint, int] = {}  # cached block -> sequences that hold it
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._unnamed = 0  # ids of answers' blocks, which nobody asks for, count down from here
        self.removed: list[Fingerprint] = []

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def free_blocks(self) -> int:
        return self._blank + len(self._idle)

    def admit(self, request: Request) -> Running | None:
        """Holds room for prompt and answer; None, and nothing changed, while that is too little."""
        holders = self._holders
        hits: list[Fingerprint] = []
        idle_hits = 0
        for block in request.reusable:
            holding = holders.get(block)
            if holding is None:
                break
            hits.append(block)
            idle_hits += holding == 0
        missing = blocks_needed(request) - len(hits)
        if missing > self.free_blocks - idle_hits:
            return None
        for block in hits:
            if holders[block] == 0:
                del self._idle[block]
            holders[block] += 1
        self._take(missing)
        tokens = len(hits) * request.block_tokens
        return Running(request, tokens, tokens, hits, missing)

    def fill(self, sequence: Running, start: int, end: int) -> list[Fingerprint]:
        """Caches the prompt's blocks that become full between two lengths; those that are new."""
        size = sequence.request.block_tokens
        blocks = sequence.request.blocks[start // size : end // size]
        new = [block for block in blocks if block not in self._holders]
        self._holders.update(dict.fromkeys(new, 1))
        sequence.held += new
        sequence.unnamed -= len(new)
        return new

    def release(self, sequence: Running) -> None:
        """Its blocks are idle from now on, the last to be evicted first."""
        request = sequence.request
        full = (request.input_tokens + request.output_tokens) // request.block_tokens
        answer = full - request.input_tokens // request.block_tokens
        for _ in range(answer):
            self._unnamed -= 1
            self._idle[self._unnamed] = None
        self._blank += sequence.unnamed - answer
        for block in reversed(sequence.held):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._idle[block] = None

    def _take(self, blocks: int) -> None:
        evicted = max(0, blocks - self._blank)
        self._blank -= blocks - evicted
        for _ in range(evicted):
            block, _ = self._idle.popitem(last=False)
            if block >= 0:
                del self._holders[Fingerprint(block)]
                self.removed.append(Fingerprint(block))


def blocks_needed(request: Request) -> int:
    """KV blocks that a request holds when it is done."""
    return -(-(request.input_tokens + request.output_tokens) // request.block_tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps under way: one with prefill in it, or several of decodes alone."""

    started_s: float
    steps: int
    first_s: float  # duration of the first step
    growth_s: float  # by which each takes longer than the one before
    chunks: Sequence[tuple[Running, int]] = ()  # prompt tokens computed, in one step

    @property
    def ends_s(self) -> float:
        k = self.steps
        return self.started_s + k * self.first_s + self.growth_s * k * (k - 1) / 2

    def steps_by(self, now_s: float) -> int:
        """Steps that are done or under way at that time: one at least."""
        past_s = now_s - self.started_s
        linear_s = self.first_s - self.growth_s / 2
        # the root of  growth/2 k^2 + linear k = past, in the form that allows growth = 0
        root = 2 * past_s / (linear_s + math.sqrt(linear_s**2 + 2 * self.growth_s * past_s))
        return min(self.steps, max(1, math.ceil(root)))


class Replica:
    """The caller drives it: `arrive` at any time, `end_step` at the time it names."""

    def __init__(self, model: EngineModel, capacity_blocks: int) -> None:
        self.cache = PrefixCache(capacity_blocks)
        self.hit_tokens: dict[int, int] = {}  # request index -> what it found cached
        self.prefill_s = 0.0  # spent on prompts so far
        self.plan: Plan | None = None
        self._model = model
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Running] = []
        self._decoding: list[tuple[int, int, Running]] = []  # heap: last step, index
        self._steps = 0
        self._context_tokens = 0  # of all decodes
        self._added: list[Fingerprint] = []

    def arrive(self, request: Request, now_s: float) -> None:
        """Queues a request. Decode steps planned ahead are cut short to let it in."""
        was_blocked = bool(self._waiting)
        self._waiting.append(request)
        if self.plan is None:
            self._start(now_s)
        elif self.plan.steps > 1 and not was_blocked:
            plan = self.plan
            self.plan = Plan(
                plan.started_s, plan.steps_by(now_s), plan.first_s, plan.growth_s, plan.chunks
            )

    def end_step(self) -> StepResult:
        """The planned steps are over; the next ones have begun, if there is work."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        result = StepResult(added=self._added, removed=self.cache.removed)
        self._added, self.cache.removed = [], []
        self._steps += plan.steps
        self._context_tokens += plan.steps * len(self._decoding)
        for sequence, tokens in plan.chunks:
            sequence.computed += tokens
            if sequence.computed == sequence.request.input_tokens:
                self._prefilling.remove(sequence)
                self._decode(sequence)
                result.first_tokens.append(sequence.request)
        while self._decoding and self._decoding[0][0] <= self._steps:
            sequence = heappop(self._decoding)[2]
            request = sequence.request
            self._context_tokens -= request.input_tokens + request.output_tokens
            self.cache.release(sequence)
            result.finished.append(request)
        self._start(plan.ends_s)
        return result

    def _decode(self, sequence: Running) -> None:
        request = sequence.request
        self._context_tokens += request.input_tokens + 1
        last_step = self._steps + request.output_tokens - 1
        heappush(self._decoding, (last_step, request.index, sequence))

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
        """The prompt tokens of the next step: first come, first served."""
        chunks: list[tuple[Running, int]] = []
        for sequence in self._prefilling:
            budget -= self._chunk(sequence, budget, chunks)
        while budget > 0 and self._waiting and self._sequences < self._model.max_sequences:
            admitted = self.cache.admit(self._waiting[0])
            if admitted is None:
                break
            self._waiting.popleft()
            self._prefilling.append(admitted)
            self.hit_tokens[admitted.request.index] = admitted.hit_tokens
            budget -= self._chunk(admitted, budget, chunks)
        return chunks

    def _chunk(self, sequence: Running, budget: int, chunks: list[tuple[Running, int]]) -> int:
        """Blocks count as cached once they are scheduled, as in vLLM: a sibling in the same step
        finds them."""
        tokens = min(budget, sequence.request.input_tokens - sequence.computed)
        if tokens <= 0:
            return 0
        start = sequence.computed
        self._added += self.cache.fill(sequence, start, start + tokens)
        chunks.append((sequence, tokens))
        return tokens

    @property
    def _sequences(self) -> int:
        return len(self._prefilling) + len(self._decoding)
