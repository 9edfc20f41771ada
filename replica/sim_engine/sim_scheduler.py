"""The scheduler of a simulated engine, with its adapters and copies from host memory."""

from collections.abc import Mapping

from kvroute.features.engine_feature import NO_ENGINE_FEATURES, EngineFeatures
from kvroute.prefill.speed import PrefillModel
from kvroute.replica.modelled.modelled_copies import Copies
from kvroute.replica.modelled.modelled_scheduler import ModelledScheduler, parts_of
from kvroute.replica.sim_engine.blocks import BlockPool
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.sequences import Job, RunningChoice


class SimulatedScheduler(ModelledScheduler[RunningChoice]):
    """The waiting choices and the batch of one engine.

    A request generates `n` choices. Each choice is a sequence of its own.
    """

    def __init__(
        self,
        config: SimulatedConfig,
        pool: BlockPool,
        prefill: PrefillModel,
        features: EngineFeatures = NO_ENGINE_FEATURES,
    ) -> None:
        super().__init__(
            pool,
            step_tokens=config.max_batched_tokens,
            max_sequences=config.max_running,
            features=features,
        )
        # Admitted choices that wait for copies from host memory. They are not in the batch yet.
        self.reloads = Copies[RunningChoice]()
        self._loras = set[str]()  # adapters of the admitted choices
        self._config = config
        self._blocks = pool
        self._prefill = prefill

    @property
    def has_work(self) -> bool:
        return bool(self.admitted or self.waiting)

    @property
    def copying(self) -> int:
        return len(self.reloads)

    def abort(self, job: Job) -> None:
        """Remove all choices of a job."""
        if not job.unfinished:
            return
        job.unfinished = 0
        self.waiting = [choice for choice in self.waiting if choice.job is not job]
        for choice in [choice for choice in self.running if choice.job is job]:
            self.remove(choice, choice.hint if choice.generated else None)
        for choice in [choice for choice in self.reloads if choice.job is job]:
            self.reloads.drop(choice)
            self._blocks.drop_reload(choice.table)
            self.remove(choice)

    def end_reloads(self, now_s: float) -> None:
        """Move choices to the batch, if their copies from host memory have ended."""
        while self.reloads and self.reloads.next_end_s <= now_s:
            choice = self.reloads.pop()
            self._blocks.end_reload(choice.table)
            choice.computed = choice.table.cached * self._config.block_size
            self.join(choice)

    def schedule(self, now_s: float) -> dict[RunningChoice, int]:
        admitted = (*self.running, *self.reloads)
        self._loras = {choice.lora for choice in admitted if choice.lora}
        return super().schedule(now_s)

    def step_s(self, prompts: Mapping[RunningChoice, int]) -> float:
        """Return how long a step takes.

        Args:
            prompts: what `schedule` has returned for it.
        """
        prefill_s = sum(self._prefill.seconds(*part) for part in parts_of(prompts))
        decodes_s = self._config.decode_per_seq_s * len(self.decoding)
        return prefill_s + self._config.decode_step_s + decodes_s

    def expected(self, sequence: RunningChoice) -> int:
        return sequence.job.request.expected_tokens

    def can_admit(self, sequence: RunningChoice) -> bool:
        """Return whether a waiting choice can be admitted.

        It cannot in these cases:
        - The batch has the maximum number of adapters, and the choice's adapter is not among them.
        - Some of its blocks are being copied from host memory for another choice. It waits for the
          end of the copy, and then shares these blocks.
        """
        is_full = len(self._loras) >= self._config.max_loras
        if is_full and sequence.lora and sequence.lora not in self._loras:
            return False
        return not self._blocks.is_reloading(sequence.table)

    def reload(self, sequence: RunningChoice, now_s: float) -> bool:
        """Begin to copy blocks from host memory, if that is faster than computing them.

        The blocks follow those blocks of the prompt that are in the engine's memory.
        """
        if sequence.lora:
            self._loras.add(sequence.lora)
        tokens, copy_s = self._worth_copying(sequence)
        if sequence.job.cached_tokens is None:
            sequence.job.cached_tokens = sequence.computed + tokens
        if not tokens:
            return False
        self._blocks.begin_reload(sequence.table, tokens // self._config.block_size)
        self.reloads.begin(sequence, copy_s, now_s)
        return True

    def _worth_copying(self, sequence: RunningChoice) -> tuple[int, float]:
        """Return how many tokens to copy from host memory, and the seconds that it takes."""
        blocks = self._blocks.hits_in_host(sequence.table)
        if not blocks or self._config.host is None:
            return 0, 0.0
        copy_s, tokens = self._config.host.reload_s(blocks), blocks * self._config.block_size
        start = sequence.computed
        is_faster = copy_s < self._prefill.seconds(start, start + tokens)
        return (tokens, copy_s) if is_faster else (0, 0.0)
