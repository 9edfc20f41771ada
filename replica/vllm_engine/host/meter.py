"""Measures the times of an engine's prefill, and of its copies from and to a host tier."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput

from kvroute.replica.engine.reload_price import ReloadPrice
from kvroute.replica.vllm_engine.blocks.events import Moved

# The speed of prefill is learned only from steps with at least this many prompt tokens, which are
# at least this share of the step's tokens. The time of other steps depends mostly on decoding.
MIN_PROMPT_TOKENS = 64
MIN_PROMPT_SHARE = 0.9


class _Step(NamedTuple):
    """A step that was scheduled and has not ended yet."""

    output: SchedulerOutput
    began_s: float
    predicted_s: float  # prefill time at the assumed speed; 0: nothing is learned from this step


@dataclass
class _Moves:
    """The copies since the last event, as the fields of a Moved event."""

    reloaded_tokens: int = 0
    in_bytes: int = 0
    in_s: float = 0.0
    out_bytes: int = 0
    out_s: float = 0.0
    disk_in_bytes: int = 0
    disk_in_s: float = 0.0
    disk_out_bytes: int = 0
    disk_failures: int = 0


class Meter:
    """Measures the prefill and the copies of one scheduler's engine."""

    def __init__(self, scheduler: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a meter for the connector's scheduler; `clock` returns seconds."""
        # Learns from the measurements whether reloading is faster than computing. None until
        # SchedulerHostTier.begin sets it, which happens before the first request.
        self.price: ReloadPrice | None = None
        self.clock = clock
        self._scheduler = scheduler
        self._steps: deque[_Step] = deque()
        self._step_ended_s = 0.0  # time at which the last step ended
        self._moves = _Moves()

    def record_scheduled(self, output: SchedulerOutput) -> None:
        """Record that vLLM has scheduled a step."""
        self._steps.append(_Step(output, self.clock(), self._predicted_s(output)))

    def record_step_end(self, output: SchedulerOutput) -> None:
        """Record the end of a step, and learn the speed of prefill from the step's time.

        Steps end in the order in which they were scheduled. If two steps overlap, the second step's
        time is counted from the end of the first step.
        """
        now_s = self.clock()
        while self._steps:
            step = self._steps.popleft()
            if step.output is output:
                if step.predicted_s and self.price:
                    took_s = now_s - max(step.began_s, self._step_ended_s)
                    self.price.record_step(step.predicted_s, took_s)
                break
        self._step_ended_s = now_s

    def record_copies(self, done: OffloadingWorkerMetadata) -> None:
        """Record the copies that all workers have made since the last step.

        The workers copy in parallel, so the time of a copy is the mean over the workers.
        """
        workers = self._scheduler.config.num_workers
        load, store, moves = done.transfer_stats.load, done.transfer_stats.store, self._moves
        moves.in_bytes += load.bytes
        moves.in_s += load.time / workers
        moves.out_bytes += store.bytes
        moves.out_s += store.time / workers
        if load.bytes and self.price:
            self.price.copies.record(load.bytes, load.time / workers, self.clock())

    def record_disk(
        self, *, in_bytes: int = 0, in_s: float = 0.0, out_bytes: int = 0, failures: int = 0
    ) -> None:
        """Record reads and writes of the disk cache (Transfers)."""
        moves = self._moves
        moves.disk_in_bytes += in_bytes
        moves.disk_in_s += in_s
        moves.disk_out_bytes += out_bytes
        moves.disk_failures += failures

    def is_cheaper(self, start: int, end: int) -> bool:
        """Return whether reloading a prompt's tokens [start, end) is faster than computing them."""
        return self.price is None or self.price.is_cheaper(start, end, self.clock())

    def record_reload(self, tokens: int) -> None:
        """Record that this many tokens of a prompt are reloaded from host memory."""
        self._moves.reloaded_tokens += tokens

    def take_events(self) -> list[KVCacheEvent]:
        """Return an event about the copies since the last call, if there were any."""
        moves, self._moves = vars(self._moves), _Moves()
        return [Moved(**moves)] if any(moves.values()) else []

    def _predicted_s(self, output: SchedulerOutput) -> float:
        """Return the predicted prefill time of a step, or 0 if nothing is learned from the step."""
        if not self.price:
            return 0.0
        parts = list(self._parts(output))
        tokens = sum(end - start for start, end in parts)
        if tokens < max(MIN_PROMPT_TOKENS, MIN_PROMPT_SHARE * output.total_num_scheduled_tokens):
            return 0.0
        return sum(self.price.prefill.seconds(start, end) for start, end in parts)

    def _parts(self, output: SchedulerOutput) -> Iterator[tuple[int, int]]:
        """Yield the range [start, end) of each prompt's tokens that the step computes."""
        for name, tokens in output.num_scheduled_tokens.items():
            if status := self._scheduler._req_status.get(name):
                start = status.req.num_computed_tokens
                if start < status.req.num_prompt_tokens:
                    yield start, start + tokens
