"""The scheduler of a simulated engine: which requests are in the batch, and what a step computes.

Requests are admitted and preempted as in vLLM. The caller passes times of its own clock.
"""

from bisect import bisect_left, insort
from operator import attrgetter

from kvroute.contract.keep import RetentionHint
from kvroute.prefill.speed import PrefillModel
from kvroute.replica.sim_engine.blocks import BlockPool
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.copies import Copies
from kvroute.replica.sim_engine.sequences import Job, RunningChoice

Batch = dict[RunningChoice, int]  # choice -> number of its tokens that a step computes
ORDER = attrgetter("order")


class SimulatedScheduler:
    """The waiting choices and the batch of one engine."""

    def __init__(self, config: SimulatedConfig, pool: BlockPool, prefill: PrefillModel) -> None:
        self.waiting: list[RunningChoice] = []  # sorted by `order`
        self.running: list[RunningChoice] = []  # in the order of admission
        self.reloads = Copies[RunningChoice]()  # admitted; they wait for copies from host memory
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
            self.remove(choice, choice.keep if choice.generated else None)
        for choice in [choice for choice in self.reloads if choice.job is job]:
            self.reloads.drop(choice)
            self._pool.drop_reload(choice.table)

    def remove(self, choice: RunningChoice, keep: RetentionHint | None = None) -> None:
        """Remove a choice from the batch; `keep` is its blocks' retention if it has ended."""
        self.running.remove(choice)
        self._pool.free(choice.table, keep)

    def end_reloads(self, now_s: float) -> None:
        """Add choices whose copies from host memory have ended to the batch."""
        while self.reloads and self.reloads.next_end_s <= now_s:
            choice = self.reloads.pop()
            self._pool.end_reload(choice.table)
            choice.computed = choice.table.cached * self._config.block_size
            self.running.append(choice)

    def schedule(self, now_s: float) -> Batch:
        """Return the next step; the blocks that it fills are held and cached now, as in vLLM."""
        running = len(self.running)
        batch, budget = self._continue_running(self._config.max_batched_tokens)
        if len(self.running) == running:  # after a preemption no request is admitted
            batch |= self._admit_waiting(budget, now_s)
        return batch

    def _continue_running(self, budget: int) -> tuple[Batch, int]:
        """Divide the token budget among running choices in the order of admission.

        If there are too few free blocks, choices that are last in order are preempted. All choices
        except the last admitted are decoding, so a long prefill gets the rest of the budget.

        Returns:
            The batch, and the rest of the budget.
        """
        batch: Batch = {}
        while budget and len(batch) < len(self.running):
            choice = self.running[len(batch)]
            tokens = min(choice.missing, budget)
            while not self._pool.extend(choice.table, choice.computed + tokens):
                victim = self._preempt_latest()
                budget += batch.pop(victim, 0)
                if victim is choice:
                    return batch, budget
            batch[choice] = tokens
            budget -= tokens
        return batch, budget

    def _preempt_latest(self) -> RunningChoice:
        victim = max(self.running, key=ORDER)
        self._pool.forget(victim.table, victim.computed)
        self.remove(victim)
        victim.computed = 0
        self.add(victim)
        return victim

    def _admit_waiting(self, budget: int, now_s: float) -> Batch:
        batch: Batch = {}
        while budget and len(self.running) + len(self.reloads) < self._config.max_running:
            choice = self._next_waiting()
            if choice is None:
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
        return batch

    def _reload(self, choice: RunningChoice, now_s: float) -> int:
        """Copy blocks after the choice's hits from host memory, if this is faster than computing.

        Returns the number of tokens of these blocks.
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

        Its adapter must have a place in the batch. If its blocks are just being copied for another
        choice, it waits until both can share the blocks.
        """
        loras = {choice.lora for choice in (*self.running, *self.reloads) if choice.lora}
        is_full = len(loras) >= self._config.max_loras
        for choice in self.waiting:
            has_place = not (is_full and choice.lora and choice.lora not in loras)
            if has_place and not self._pool.is_reloading(choice.table):
                return choice
        return None
