"""How long an engine takes to compute prompts, and to copy blocks from a host tier and to it."""

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

# Steps with fewer prompt tokens say little about the speed of prompts, and so do those with many
# others: a token of an answer takes its time for other reasons.
TELLING_TOKENS = 64
TELLING_SHARE = 0.9


class _Step(NamedTuple):
    """What the engine was told to compute."""

    output: SchedulerOutput
    began_s: float
    predicted_s: float  # to compute it, as claimed; 0: that says little


@dataclass
class _Moves:
    """As in Moved."""

    reloaded_tokens: int = 0
    in_bytes: int = 0
    in_s: float = 0.0
    out_bytes: int = 0
    out_s: float = 0.0


class Meter:
    """Of one scheduler. scheduler: the connector's. price: None until the engine's first request;
    it learns from all that is measured. clock: in seconds."""

    def __init__(self, scheduler: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self.price: ReloadPrice | None = None
        self.clock = clock
        self._scheduler = scheduler
        self._steps: deque[_Step] = deque()
        self._computed_s = 0.0  # when the last step had ended
        self._moves = _Moves()

    def scheduled(self, output: SchedulerOutput) -> None:
        self._steps.append(_Step(output, self.clock(), self._predicted_s(output)))

    def computed(self, output: SchedulerOutput) -> None:
        """Steps end in their order. Where they overlap, one takes the time since the last one's
        end."""
        now_s = self.clock()
        while self._steps:
            step = self._steps.popleft()
            if step.output is output:
                if step.predicted_s and self.price:
                    took_s = now_s - max(step.began_s, self._computed_s)
                    self.price.computed(step.predicted_s, took_s)
                break
        self._computed_s = now_s

    def copied(self, done: OffloadingWorkerMetadata) -> None:
        """Since the last step, by all workers at the same time."""
        workers = self._scheduler.config.num_workers
        load, store, moves = done.transfer_stats.load, done.transfer_stats.store, self._moves
        moves.in_bytes += load.bytes
        moves.in_s += load.time / workers
        moves.out_bytes += store.bytes
        moves.out_s += store.time / workers
        if load.bytes and self.price:
            self.price.copies.copied(load.bytes, load.time / workers, self.clock())

    def is_cheaper(self, start: int, end: int) -> bool:
        """To reload the tokens [start, end) of a prompt than to compute them."""
        return self.price is None or self.price.is_cheaper(start, end, self.clock())

    def reloads(self, tokens: int) -> None:
        self._moves.reloaded_tokens += tokens

    def moved(self) -> list[KVCacheEvent]:
        """Since the last call."""
        moves, self._moves = vars(self._moves), _Moves()
        return [Moved(**moves)] if any(moves.values()) else []

    def _predicted_s(self, output: SchedulerOutput) -> float:
        """0: its time says little about the speed of prompts."""
        if not self.price:
            return 0.0
        parts = list(self._parts(output))
        tokens = sum(end - start for start, end in parts)
        if tokens < max(TELLING_TOKENS, TELLING_SHARE * output.total_num_scheduled_tokens):
            return 0.0
        return sum(self.price.prefill.seconds(start, end) for start, end in parts)

    def _parts(self, output: SchedulerOutput) -> Iterator[tuple[int, int]]:
        """Of prompts, from their first token to be computed to the last."""
        for name, tokens in output.num_scheduled_tokens.items():
            if status := self._scheduler._req_status.get(name):
                start = status.req.num_computed_tokens
                if start < status.req.num_prompt_tokens:
                    yield start, start + tokens
