"""The scheduler of a simulated engine: it decides which tokens each step computes.

Requests are admitted to the batch and preempted as in vLLM. Batch requests give way to others by
the rules in contract/priority.py. The caller passes the time, in seconds of any clock.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import attrgetter

from kvroute.contract.keep import RetentionHint
from kvroute.contract.priority import lane_tokens
from kvroute.prefill.speed import PrefillModel
from kvroute.replica.sim_engine.blocks import BlockPool
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.modelled_copies import Copies
from kvroute.replica.sim_engine.sequences import Job, RunningChoice

Batch = dict[RunningChoice, int]  # choice -> number of its tokens that the step computes
ORDER = attrgetter("order")


class SimulatedScheduler:
    """The waiting choices and the batch of one engine.

    A request generates `n` choices. Each choice is a sequence of its own.
    """

    def __init__(self, config: SimulatedConfig, pool: BlockPool, prefill: PrefillModel) -> None:
        self.waiting: list[RunningChoice] = []  # not admitted; sorted by `order`
        self.running: list[RunningChoice] = []  # in the order of admission
        # Admitted choices that wait for copies from host memory. They are not in `running` yet.
        self.reloads = Copies[RunningChoice]()
        self._preemptions = 0  # number of preemptions since the start
        self._config = config
        self._pool = pool
        self._prefill = prefill

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.reloads)

    def add(self, choice: RunningChoice) -> None:
        """Add a choice that waits for its admission."""
        insort(self.waiting, choice, key=ORDER)

    def abort(self, job: Job) -> None:
        """Remove all choices of a job."""
        if not job.unfinished:
            return
        job.unfinished = 0
        first = bisect_left(self.waiting, (*job.order, 0), key=ORDER)
        end = bisect_left(self.waiting, (*job.order, job.sampling.n), lo=first, key=ORDER)
        del self.waiting[first:end]
        for choice in [choice for choice in self.running if choice.job is job]:
            self.remove(choice, choice.hint if choice.generated else None)
        for choice in [choice for choice in self.reloads if choice.job is job]:
            self.reloads.drop(choice)
            self._pool.drop_reload(choice.table)

    def remove(self, choice: RunningChoice, hint: RetentionHint | None = None) -> None:
        """Remove a choice from the batch, and release its blocks.

        Args:
            choice: A running choice.
            hint: The new retention of its blocks. None: keep the old one, for example because the
                choice is preempted.
        """
        self.running.remove(choice)
        self._pool.free(choice.table, hint)

    def end_reloads(self, now_s: float) -> None:
        """Move choices to the batch, if their copies from host memory have ended."""
        while self.reloads and self.reloads.next_end_s <= now_s:
            choice = self.reloads.pop()
            self._pool.end_reload(choice.table)
            choice.computed = choice.table.cached * self._config.block_size
            self.running.append(choice)

    def schedule(self, now_s: float) -> Batch:
        """Return the next step.

        The blocks that the step will fill are held and cached before the step runs, as in vLLM.
        """
        self._make_space(now_s)
        before = self._preemptions
        others, prompts = self._divided(now_s)
        batch, budget = self._continue(others, self._config.max_batched_tokens)
        if self._preemptions == before:
            admitted, budget = self._admit_waiting(budget, now_s, lane=False)
            batch |= admitted
        if any(tokens > 1 for each, tokens in batch.items() if not each.is_in_lane(now_s)):
            budget = 0
        elif self._has_others(now_s):
            budget = min(budget, lane_tokens(self._config.max_batched_tokens))
        in_lane, budget = self._continue(prompts, budget)
        if self._preemptions == before:
            in_lane |= self._admit_waiting(budget, now_s, lane=True)[0]
        elif in_lane:  # a prompt of the lane may have taken the blocks of an answer in the lane
            running = {*self.running}
            batch = {choice: tokens for choice, tokens in batch.items() if choice in running}
        return batch | in_lane

    def _divided(self, now_s: float) -> tuple[list[RunningChoice], list[RunningChoice]]:
        """Return the running choices without the prompts of the batch lane, and these prompts."""
        others, prompts = list[RunningChoice](), list[RunningChoice]()
        for choice in self.running:
            is_prompt = not choice.is_decoding and choice.is_in_lane(now_s)
            (prompts if is_prompt else others).append(choice)
        return others, prompts

    def _has_others(self, now_s: float) -> bool:
        """Return whether there are requests that are not in the batch lane."""
        choices = (*self.running, *self.waiting, *self.reloads)
        return not all(choice.is_in_lane(now_s) for choice in choices)

    def _make_space(self, now_s: float) -> None:
        """Preempt batch requests while the first other request lacks blocks."""
        first = self.waiting[0] if self.waiting else None
        if first is None or first.is_in_lane(now_s):
            return
        while not self._pool.has_space(first.table):
            last = max(self.running, key=ORDER, default=None)
            if last is None or not last.is_in_lane(now_s):
                return
            self._preempt_latest()

    def _continue(self, choices: Sequence[RunningChoice], budget: int) -> tuple[Batch, int]:
        """Divide the token budget among running choices, in their order.

        If there are too few free blocks, the choices with the largest `order` are preempted.
        Usually, only the last admitted choice needs further prefill. The choices before it are
        decoding and need one token each, so a long prefill gets the rest of the budget.

        Returns:
            The batch, and the remaining budget.
        """
        batch: Batch = {}
        running = {*self.running}
        for choice in choices:
            if not budget:
                break
            if choice not in running:  # it was preempted for an earlier one
                continue
            tokens = min(choice.missing, budget)
            while not self._pool.extend(choice.table, choice.computed + tokens):
                victim = self._preempt_latest()
                running.discard(victim)
                budget += batch.pop(victim, 0)
                if victim is choice:
                    return batch, budget
            batch[choice] = tokens
            budget -= tokens
        return batch, budget

    def _preempt_latest(self) -> RunningChoice:
        victim = max(self.running, key=ORDER)
        self._preemptions += 1
        self._pool.forget(victim.table, victim.computed)
        self.remove(victim)
        victim.computed = 0
        self.add(victim)
        return victim

    def _admit_waiting(self, budget: int, now_s: float, *, lane: bool) -> tuple[Batch, int]:
        """Admit waiting choices in their order, while they are in the lane or while they are not.

        Args:
            budget: Tokens that the step has left for them.
            now_s: The current time.
            lane: Whether to admit choices of the batch lane.

        Returns:
            The admitted choices, and the remaining budget.
        """
        batch: Batch = {}
        while budget and len(self.running) + len(self.reloads) < self._config.max_running:
            choice = self._next_waiting()
            if choice is None or choice.is_in_lane(now_s) != lane:
                break
            hit_blocks = self._pool.admit(choice.table)
            if hit_blocks is None:
                break
            self.waiting.remove(choice)
            choice.computed = hit_blocks * self._config.block_size
            reloaded = self._reload(choice, now_s)
            if choice.job.cached_tokens is None:
                choice.job.cached_tokens = choice.computed + reloaded
            if reloaded:
                continue
            self.running.append(choice)
            tokens = min(choice.missing, budget)
            self._pool.extend(choice.table, choice.computed + tokens)
            batch[choice] = tokens
            budget -= tokens
        return batch, budget

    def _reload(self, choice: RunningChoice, now_s: float) -> int:
        """Begin to copy blocks from host memory, if that is faster than computing them.

        The blocks follow those blocks of the prompt that are in the engine's memory.

        Returns:
            The number of tokens that are copied; 0 if the engine computes them instead.
        """
        blocks = self._pool.hits_in_host(choice.table)
        if not blocks or self._config.host is None:
            return 0
        copy_s, tokens = self._config.host.reload_s(blocks), blocks * self._config.block_size
        if copy_s >= self._prefill.seconds(choice.computed, choice.computed + tokens):
            return 0
        self._pool.begin_reload(choice.table, blocks)
        self.reloads.begin(choice, copy_s, now_s)
        return tokens

    def _next_waiting(self) -> RunningChoice | None:
        """Return the first waiting choice that can be admitted.

        A choice cannot be admitted in these cases:
        - The batch has the maximum number of adapters, and the choice's adapter is not among them.
        - Some of its blocks are being copied from host memory for another choice. It waits for the
          end of the copy, and then shares these blocks.
        """
        loras = {choice.lora for choice in (*self.running, *self.reloads) if choice.lora}
        is_full = len(loras) >= self._config.max_loras
        for choice in self.waiting:
            lora_fits = not (is_full and choice.lora and choice.lora not in loras)
            if lora_fits and not self._pool.is_reloading(choice.table):
                return choice
        return None
