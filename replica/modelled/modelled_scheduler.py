"""The scheduler of a modelled engine: it decides which tokens each step computes.

It follows the scheduler of vLLM 0.32 with its policy `priority`. A sequence is admitted if the
blocks of its whole prompt are free, but nothing is reserved: its blocks are allocated when a step
computes them, and one more whenever its answer fills a block. If none is free then, the running
sequence that is last in order is preempted. All of its blocks are released, but stay cached until
they are evicted. Later, it is admitted again and computes what is no longer cached, its answer so
far included. Batch requests give way to others by the rules in contract/priority.py.

The simulated engine runs it by a clock, and `kvroute replay` by events. The caller passes the time,
in seconds of any clock.
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from operator import attrgetter
from typing import Generic, TypeVar

from kvroute.contract.keep import RetentionHint
from kvroute.contract.priority import lane_tokens
from kvroute.features.engine_feature import (
    NO_DATA,
    NO_ENGINE_FEATURES,
    PROMPTS,
    ComputedPart,
    EngineFeatures,
    PendingPrompt,
)
from kvroute.replica.modelled.table_pool import SequenceTable, TablePool

ORDER = attrgetter("order")


class ModelledSequence:
    """A prompt and its answer in a modelled engine. Subclasses have these attributes."""

    table: SequenceTable
    computed: int  # number of leading tokens whose KV is computed, as of the step `since`
    since: int  # number of the step from which on it decodes
    is_in_lane: bool  # whether it gave way to others when it was admitted

    @property
    def order(self) -> tuple[float, int, int]:
        """Return the sort key: admission in ascending order, preemption in descending order.

        The first item is the time at which the sequence is due, in seconds.
        """
        raise NotImplementedError

    @property
    def is_batch(self) -> bool:
        """Return whether it gives way to others until it is due."""
        raise NotImplementedError

    @property
    def missing(self) -> int:
        """Return the number of tokens to compute before the next token can be drawn."""
        return self.table.length - self.computed

    @property
    def arrived_s(self) -> float:
        """Return the time of its arrival at the engine."""
        raise NotImplementedError

    @property
    def data(self) -> Mapping[str, bytes]:
        """Return what its request has for features."""
        return NO_DATA

    def gives_way(self, now_s: float) -> bool:
        """Return whether it still has to give way to others."""
        return self.is_batch and self.order[0] > now_s

    def stopped(self, steps: int) -> None:
        """Record that it does not decode any more, after this many steps with a token each."""


S = TypeVar("S", bound=ModelledSequence)


def parts_of(chunks: Mapping[S, int]) -> list[ComputedPart]:
    """Return the parts of prompts that a step computes.

    Args:
        chunks: what `schedule` has returned for the step, which has not ended.
    """
    return [ComputedPart(each.computed, each.computed + tokens) for each, tokens in chunks.items()]


class ModelledScheduler(Generic[S]):
    """The waiting sequences and the batch of one engine.

    Args:
        pool: the engine's KV cache.
        step_tokens: maximum tokens of a step, of prompts and answers together.
        max_sequences: maximum number of admitted sequences.
        features: what features do in the engine.
    """

    def __init__(
        self,
        pool: TablePool,
        *,
        step_tokens: int,
        max_sequences: int,
        features: EngineFeatures = NO_ENGINE_FEATURES,
    ) -> None:
        self.waiting: list[S] = []  # not admitted; sorted by `order`
        self.prefilling: list[S] = []  # admitted, with more than one token to compute
        self.decoding: dict[S, None] = {}  # each step computes one token of these; an ordered set
        self.steps = 0  # number of steps since the start
        self.context_tokens = 0  # sum of the lengths of all decoding sequences
        self.preemptions = 0  # number of preemptions since the start
        self._pool = pool
        self._step_tokens = step_tokens
        self._max_sequences = max_sequences
        self._features = features
        self._in_lane = 0  # number of admitted sequences with is_in_lane
        # Number of a step modulo the block size -> decoding sequences that need a block in it.
        self._growing: list[dict[S, None]] = [{} for _ in range(pool.block_size)]

    @property
    def running(self) -> Iterator[S]:
        """Return the sequences in the batch."""
        return chain(self.prefilling, self.decoding)

    @property
    def admitted(self) -> int:
        """Return the number of sequences that hold blocks."""
        return len(self.prefilling) + len(self.decoding) + self.copying

    # What a subclass adds.

    @property
    def copying(self) -> int:
        """Return the number of admitted sequences that wait for a copy, outside of the batch."""
        return 0

    def expected(self, sequence: S) -> int:
        """Return how many leading tokens of a waiting sequence are probably cached."""
        return 0

    def can_admit(self, sequence: S) -> bool:
        """Return whether nothing but blocks keeps a waiting sequence from its admission."""
        return True

    def reload(self, sequence: S, now_s: float) -> bool:
        """Start a copy for a sequence that was just admitted; return whether it waits for it."""
        return False

    def preempted(self, sequence: S, now_s: float) -> None:
        """Record that a sequence was preempted. It waits again."""

    # The life of a sequence.

    def add(self, sequence: S) -> None:
        """Add a sequence that waits for its admission."""
        insort(self.waiting, sequence, key=ORDER)

    def schedule(self, now_s: float) -> dict[S, int]:
        """Return the prompt tokens of the next step, and allocate all blocks that it needs.

        Each sequence in `decoding` computes a token, too.
        """
        self._make_space(now_s)
        before = self.preemptions
        while len(self._growing[self._place(0)]) > self._pool.free_blocks:
            self._preempt_last(now_s)
        self._grow()
        chunks: dict[S, int] = {}
        others = [each for each in self.prefilling if not each.is_in_lane]
        in_lane = [each for each in self.prefilling if each.is_in_lane]
        budget = self._continue(others, self._prompt_tokens(now_s), chunks, now_s)
        if self.preemptions == before:
            budget = self._admit_waiting(budget, chunks, now_s, lane=False)
        is_blocked = bool(self.waiting) and not self.waiting[0].gives_way(now_s)
        if any(tokens > 1 for tokens in chunks.values()):
            budget = 0
        elif self.admitted > self._in_lane or is_blocked:
            budget = min(budget, lane_tokens(self._step_tokens))
        budget = self._continue(in_lane, budget, chunks, now_s)
        if self.preemptions == before:
            self._admit_waiting(budget, chunks, now_s, lane=True)
        return chunks

    def record_step(self, took_s: float, chunks: Mapping[S, int]) -> None:
        """Tell features how long a step took, before its tokens count as computed.

        Args:
            took_s: the time of the step.
            chunks: what `schedule` has returned for it.
        """
        if self._features.has_any:
            self._features.step_ended(took_s, parts_of(chunks))

    def advance(self, steps: int = 1) -> None:
        """Count steps that have ended, and allocate the blocks of all of them but the first."""
        for _ in range(steps - 1):
            self.steps += 1
            self._grow()
        self.steps += 1
        self.context_tokens += steps * len(self.decoding)

    def join(self, sequence: S) -> None:
        """Add an admitted sequence to the batch, after its copy has ended."""
        self.prefilling.append(sequence)

    def decode(self, sequence: S) -> None:
        """Let a sequence decode from the next step on: a step has just given it a token."""
        self.prefilling.remove(sequence)
        self.decoding[sequence] = None
        sequence.since = self.steps
        self.context_tokens += sequence.table.length
        self._growing[self._phase(sequence)][sequence] = None

    def computed(self, sequence: S) -> int:
        """Return how many leading tokens of a decoding sequence are computed now."""
        return sequence.computed + self.steps - sequence.since

    def remove(self, sequence: S, hint: RetentionHint | None = None) -> None:
        """Remove an admitted sequence, and release its blocks.

        Args:
            sequence: A sequence in the batch, or one that waits for a copy.
            hint: The new retention of its blocks. None: keep the old one.
        """
        if sequence in self.decoding:
            self._stop(sequence)
        elif sequence in self.prefilling:
            self.prefilling.remove(sequence)
        self._in_lane -= sequence.is_in_lane
        self._pool.free(sequence.table, hint)

    def steps_alike(self, steps: int) -> int:
        """Return how many of the next `steps` steps need no decision, if all sequences decode.

        The blocks of the first of these steps are allocated. Steps that evict blocks are limited to
        one per token of a block, since routers learn of evictions at the end of these steps.
        """
        size = self._pool.block_size
        if len(self.decoding) * -(-steps // size) <= self._pool.cache.free.blank:
            return steps
        steps, free = min(steps, size), self._pool.free_blocks
        for step in range(1, steps):
            free -= len(self._growing[self._place(step)])
            if free < 0:
                return step
        return steps

    # How a step is scheduled.

    def _prompt_tokens(self, now_s: float) -> int:
        """Return the most prompt tokens that the next step may compute."""
        return self._features.prompt_tokens(
            self._step_tokens - len(self.decoding),
            answers=lambda: [each.data for each in self.decoding],
            prompts=lambda: islice(self._pending(now_s), PROMPTS),
        )

    def _pending(self, now_s: float) -> Iterator[PendingPrompt]:
        """Yield the prompts that are not computed, in the order of their computation."""
        for each in self.prefilling:
            if not each.is_in_lane:
                yield PendingPrompt(each.computed, each.table.length, now_s - each.arrived_s)
        for each in self.waiting:
            if each.gives_way(now_s):
                return
            yield PendingPrompt(self.expected(each), each.table.length, now_s - each.arrived_s)

    def _make_space(self, now_s: float) -> None:
        """Preempt batch requests while the first other sequence that waits lacks blocks."""
        if not self._in_lane or not self.waiting or self.waiting[0].gives_way(now_s):
            return
        while not self._pool.has_space(self.waiting[0].table):
            last = max(self.running, key=ORDER, default=None)
            if last is None or not last.is_in_lane:
                return
            self._preempt_last(now_s)

    def _continue(
        self, sequences: Iterable[S], budget: int, chunks: dict[S, int], now_s: float
    ) -> int:
        """Compute tokens of admitted prompts in their order, and return the remaining budget."""
        for sequence in sequences:
            tokens = min(budget, sequence.missing)
            if tokens <= 0:
                break
            while sequence in self.prefilling:
                if self._pool.extend(sequence.table, sequence.computed + tokens):
                    chunks[sequence] = tokens
                    budget -= tokens
                    break
                budget += chunks.pop(self._preempt_last(now_s), 0)
        return budget

    def _admit_waiting(self, budget: int, chunks: dict[S, int], now_s: float, *, lane: bool) -> int:
        """Admit waiting sequences while they give way to others, or while they do not.

        Args:
            budget: Tokens that the step has left for them.
            chunks: The prompt tokens of the step; those of admitted sequences are added.
            now_s: The current time.
            lane: Whether to admit sequences that give way to others.

        Returns:
            The remaining budget.
        """
        while budget > 0 and self.admitted < self._max_sequences:
            sequence = next(filter(self.can_admit, self.waiting), None)
            if sequence is None or sequence.gives_way(now_s) != lane:
                break
            hits = self._pool.admit(sequence.table)
            if hits is None:
                break
            self.waiting.remove(sequence)
            sequence.computed = hits * self._pool.block_size
            sequence.is_in_lane = lane
            self._in_lane += lane
            if not self.reload(sequence, now_s):
                self.join(sequence)
                budget = self._continue([sequence], budget, chunks, now_s)
        return budget

    def _preempt_last(self, now_s: float) -> S:
        """Preempt the running sequence that is last in order, and return it."""
        last = max(self.running, key=ORDER)
        if last in self.decoding:
            self._stop(last)
        self._pool.forget(last.table, last.computed)  # the step will not compute these blocks
        self.remove(last)
        last.computed = 0
        self.preemptions += 1
        self.preempted(last, now_s)
        self.add(last)
        return last

    def _stop(self, sequence: S) -> None:
        """Remove a sequence from those that decode."""
        del self.decoding[sequence]
        del self._growing[self._phase(sequence)][sequence]
        steps = self.steps - sequence.since
        sequence.computed += steps
        sequence.stopped(steps)
        self.context_tokens -= sequence.table.length

    def _phase(self, sequence: S) -> int:
        return (sequence.since - sequence.computed) % self._pool.block_size

    def _place(self, steps: int) -> int:
        return (self.steps + steps) % self._pool.block_size

    def _grow(self) -> None:
        """Cache the blocks that the next step fills, and allocate those that it begins."""
        for sequence in self._growing[self._place(1)]:
            self._pool.store(sequence.table, (self.computed(sequence) + 1) // self._pool.block_size)
        for sequence in self._growing[self._place(0)]:
            self._pool.hold(sequence.table, 1)
