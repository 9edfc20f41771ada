"""The requests and the scheduled steps of a modelled engine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import RetentionHint
from kvroute.replay.workload.trace import Request


@dataclass(slots=True, eq=False)
class Running:
    """A request that the engine has admitted."""

    request: Request
    computed: int  # number of prompt tokens whose keys and values are cached, including hits
    blocks: list[int]  # indices of the cache blocks for the prompt and the answer
    keep: RetentionHint  # when the blocks may be evicted after the answer
    waited: "WaitingPrompt"  # the request as it waited, in case it is preempted
    is_in_lane: bool = False  # whether it gives way to others


@dataclass(slots=True)
class StepResult:
    """What routers learn at the end of the planned steps."""

    first_tokens: list[Request] = field(default_factory=list)  # requests with their first token
    finished: list[Request] = field(default_factory=list)
    added: list[Fingerprint] = field(default_factory=list)  # newly cached blocks
    removed: list[Fingerprint] = field(default_factory=list)  # evicted blocks; apply before `added`


def blocks_needed(request: Request) -> int:
    """Return the number of KV blocks for a request's prompt and whole answer."""
    return -(-(request.input_tokens + request.output_tokens) // request.block_tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """The scheduled steps: one step with prefill, or several steps with decodes only."""

    started_s: float
    steps: int
    first_s: float  # duration of the first step
    growth_s: float  # how much longer each step is than the step before
    chunks: Sequence[tuple[Running, int]] = ()  # sequence, its prompt tokens in this step

    @property
    def ends_s(self) -> float:
        """Return the time at which the last step ends."""
        k = self.steps
        return self.started_s + k * self.first_s + self.growth_s * k * (k - 1) / 2

    def steps_by(self, now_s: float) -> int:
        """Return the number of steps that have started by that time; it is at least 1."""
        past_s = now_s - self.started_s
        linear_s = self.first_s - self.growth_s / 2
        # k steps take growth/2 k^2 + linear k seconds. This solves for k if they take `past_s`, in
        # the form of the root that also allows growth = 0.
        root = 2 * past_s / (linear_s + math.sqrt(linear_s**2 + 2 * self.growth_s * past_s))
        return min(self.steps, max(1, math.ceil(root)))


class WaitingPrompt(NamedTuple):
    """A waiting request. They are admitted in the order of their first two fields."""

    due_s: float  # time of arrival, plus the order from the router
    number: int  # number of the arrival
    request: Request
    keep: RetentionHint
    is_batch: bool = False
    generated: int = 0  # tokens of the answer that were generated before it was preempted

    def is_in_lane(self, now_s: float) -> bool:
        return self.is_batch and self.due_s > now_s
