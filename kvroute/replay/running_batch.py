"""The requests that a modelled engine has admitted, and the KV blocks that they hold.

This follows the scheduler of vLLM 0.32 with its policy `priority`. A request is admitted if the
blocks of its whole prompt are free, but nothing is reserved: its blocks are allocated when a step
computes them, and one more whenever its answer fills a block. If none is free then, the running
request that is last in order is preempted. All of its blocks are released, but stay cached until
they are evicted. Later, it is admitted again and computes what is no longer cached, its answer so
far included.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replay.steps import Running, WaitingPrompt
from kvroute.replica.sim_engine.paged_cache import PagedCache

ORDER = attrgetter("waited.due_s", "waited.number")


@dataclass(slots=True)
class RunningBatch:
    """The admitted requests of one engine, in two groups: with a prompt to compute, and decoding.

    Args:
        cache: the engine's KV cache.
        block_tokens: tokens in a block.
        watermark_blocks: blocks that an admission leaves free while other requests run.
    """

    cache: PagedCache
    block_tokens: int
    watermark_blocks: int = 0
    # Blocks of prompts that were cached since the caller has cleared this, as an ordered set.
    added: dict[Fingerprint, None] = field(default_factory=dict)
    prefilling: list[Running] = field(default_factory=list)
    decoding: dict[Running, None] = field(default_factory=dict)  # an ordered set
    steps: int = 0  # number of steps since the start
    context_tokens: int = 0  # sum of the lengths of all decoding requests
    preemptions: int = 0
    # Heap: number of a request's last step, number of its arrival, the request. Entries of
    # preempted requests stay until they are the first.
    _ends: list[tuple[int, int, Running]] = field(default_factory=list)
    # Number of a step modulo block_tokens -> the decoding requests that need a block in it.
    _growing: list[dict[Running, None]] = field(init=False)
    # Blocks of answers have the fingerprints -1, -2 and so on, which no prompt has.
    _answer_blocks: int = 0

    def __post_init__(self) -> None:
        self._growing = [{} for _ in range(self.block_tokens)]

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def last(self) -> Running | None:
        """Return the running request that is last in order; None: nothing runs."""
        return max((*self.prefilling, *self.decoding), key=ORDER, default=None)

    def admit(self, waiting: WaitingPrompt, *, is_alone: bool, now_s: float) -> Running | None:
        """Let a request hold its cached blocks; return None if the blocks of all its tokens lack.

        Args:
            waiting: the first waiting request.
            is_alone: whether no other request runs.
            now_s: the current time.
        """
        spare = 0 if is_alone else self.watermark_blocks
        hits = self.cache.admit(waiting.reusable, waiting.blocks + spare)
        if hits is None:
            return None
        return Running(
            waiting,
            length=waiting.length,
            computed=len(hits) * self.block_tokens,
            blocks=hits,
            hashes=[*waiting.hashes],
            cached=len(hits),
            is_in_lane=waiting.is_in_lane(now_s),
        )

    def has_space(self, waiting: WaitingPrompt) -> bool:
        """Return whether the blocks of all tokens of a waiting request are free."""
        return self.cache.has_space(waiting.reusable, waiting.blocks)

    def hold(self, sequence: Running, blocks: int) -> None:
        """Let an admitted request hold this many of its next blocks, which are copied to it."""
        sequence.blocks += self.cache.take(blocks)

    def extend(self, sequence: Running, tokens: int) -> bool:
        """Let a request hold the blocks of its first `tokens` tokens, and cache the full ones.

        As in vLLM, blocks are cached before the step computes them, so that another request in the
        same step can reuse them. If too few blocks are free, change nothing and return False.
        """
        needed = -(-tokens // self.block_tokens) - len(sequence.blocks)
        if needed > len(self.cache.free):
            return False
        if needed > 0:
            sequence.blocks += self.cache.take(needed)
        self.store(sequence, tokens // self.block_tokens)
        return True

    def store(self, sequence: Running, full: int) -> None:
        """Cache a request's first `full` blocks."""
        for number in range(sequence.cached, full):
            if number == len(sequence.hashes):
                self._answer_blocks += 1
                sequence.hashes.append(Fingerprint(-self._answer_blocks))
            hash_ = sequence.hashes[number]
            if hash_ > 0 and hash_ not in self.cache:
                self.added[hash_] = None
            self.cache.store(sequence.blocks[number], hash_)
        sequence.cached = max(sequence.cached, full)

    def decode(self, sequence: Running) -> None:
        """Let a request decode from the next step on: a step has just given it a token."""
        sequence.length += 1
        sequence.since = self.steps
        self.decoding[sequence] = None
        self.context_tokens += sequence.length
        self._growing[self._phase(sequence)][sequence] = None
        request = sequence.request
        last = self.steps + request.input_tokens + request.output_tokens - sequence.length
        heappush(self._ends, (last, sequence.waited.number, sequence))

    def advance(self, steps: int) -> None:
        """Count steps that have ended, and allocate the blocks of all of them but the first."""
        for _ in range(steps - 1):
            self.steps += 1
            self.grow()
        self.steps += 1
        self.context_tokens += steps * len(self.decoding)

    def pop_ended(self) -> list[Running]:
        """Remove and return the requests whose answers are complete. Their blocks stay held."""
        ended = []
        while (first := self._next_end) is not None and self._ends[0][0] <= self.steps:
            self._stop(first)
            ended.append(first)
        return ended

    @property
    def _next_end(self) -> Running | None:
        while self._ends and self._ends[0][2] not in self.decoding:
            heappop(self._ends)
        return self._ends[0][2] if self._ends else None

    def can_grow(self) -> bool:
        """Return whether the blocks are free that the decoding requests need in the next step."""
        return len(self._growing[self.steps % self.block_tokens]) <= len(self.cache.free)

    def grow(self) -> None:
        """Cache the blocks that the next step fills, and allocate those that it begins."""
        for sequence in self._growing[(self.steps + 1) % self.block_tokens]:
            computed = sequence.computed + self.steps - sequence.since
            self.store(sequence, (computed + 1) // self.block_tokens)
        growing = self._growing[self.steps % self.block_tokens]
        for sequence, block in zip(growing, self.cache.take(len(growing)), strict=True):
            sequence.blocks.append(block)

    def steps_alike(self) -> int:
        """Return how many steps can run without another decision, if all requests are decoding.

        The blocks of the first of these steps are allocated. Steps that evict blocks are limited to
        one per token of a block, since routers learn of evictions at the end of these steps.
        """
        assert self._next_end is not None
        steps = self._ends[0][0] - self.steps
        most = len(self.decoding) * -(-steps // self.block_tokens)  # blocks that they allocate
        if most <= self.cache.free.blank:
            return steps
        steps, free = min(steps, self.block_tokens), len(self.cache.free)
        for step in range(1, steps):
            free -= len(self._growing[(self.steps + step) % self.block_tokens])
            if free < 0:
                return step
        return steps

    def preempt(self) -> Running:
        """Preempt the running request that is last in order, and return it."""
        last = self.last
        assert last is not None
        if last in self.decoding:
            self._stop(last)
        else:
            self.prefilling.remove(last)
        first = last.computed // self.block_tokens
        self.cache.forget(last.blocks[first : last.cached])  # the step will not compute them
        self.cache.release(last.blocks)
        self.preemptions += 1
        return last

    def _stop(self, sequence: Running) -> None:
        """Remove a request from those that decode."""
        del self.decoding[sequence]
        del self._growing[self._phase(sequence)][sequence]
        sequence.length += self.steps - sequence.since
        sequence.computed += self.steps - sequence.since
        self.context_tokens -= sequence.length

    def _phase(self, sequence: Running) -> int:
        return (sequence.since - sequence.computed) % self.block_tokens
