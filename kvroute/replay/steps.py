"""The requests and the scheduled steps of a modelled engine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvroute.blocks.fingerprint import Fingerprint, reusable_blocks
from kvroute.contract.keep import RetentionHint
from kvroute.replay.workload.trace import Request


class WaitingPrompt(NamedTuple):
    """A waiting request. They are admitted in the order of their first two fields."""

    due_s: float  # time of arrival, plus the order from the router
    number: int  # number of the arrival
    request: Request
    keep: RetentionHint
    is_batch: bool = False
    generated: int = 0  # tokens of the answer that were generated before it was preempted
    answer: tuple[Fingerprint, ...] = ()  # fingerprints of the full blocks of these tokens
    preempted_s: float = 0.0  # time of the last of these tokens

    def is_in_lane(self, now_s: float) -> bool:
        return self.is_batch and self.due_s > now_s

    @property
    def length(self) -> int:
        """Return the tokens of the prompt and of the answer so far."""
        return self.request.input_tokens + self.generated

    @property
    def blocks(self) -> int:
        """Return the number of blocks of all of these tokens."""
        return -(-self.length // self.request.block_tokens)

    @property
    def hashes(self) -> tuple[Fingerprint, ...]:
        """Return the fingerprints of the full blocks of all of these tokens."""
        request = self.request
        prompt = request.blocks[: request.input_tokens // request.block_tokens]
        return (*prompt, *self.answer) if self.answer else prompt

    @property
    def reusable(self) -> tuple[Fingerprint, ...]:
        """Return the blocks that a cache can provide; the last token is always computed."""
        return self.hashes[: reusable_blocks(self.length, self.request.block_tokens)]


@dataclass(slots=True, eq=False)
class Running:
    """A request that the engine has admitted."""

    waited: WaitingPrompt  # the request as it waited
    length: int  # tokens of the prompt and of the answer so far
    computed: int  # number of leading tokens whose keys and values are cached, including hits
    blocks: list[int]  # indices of its cache blocks
    hashes: list[Fingerprint]  # fingerprints of its first full blocks, as far as they are known
    cached: int  # number of leading blocks that are full and cached
    is_in_lane: bool = False  # whether it gives way to others
    # While it decodes, `length` and `computed` are those of the step with the number `since`.
    since: int = 0

    @property
    def request(self) -> Request:
        return self.waited.request

    def preempted(self, now_s: float) -> WaitingPrompt:
        """Return the request as it waits again. Its length must be up to date."""
        prompt = self.request.input_tokens
        answer = tuple(self.hashes[prompt // self.request.block_tokens :])
        generated = self.length - prompt
        # A prompt with an answer may be preempted again before the answer has another token.
        since_s = now_s if generated > self.waited.generated else self.waited.preempted_s
        return self.waited._replace(generated=generated, answer=answer, preempted_s=since_s)

    @property
    def missing(self) -> int:
        """Return the number of tokens to compute before the answer gets its next token."""
        return self.length - self.computed


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
    chunks: Mapping[Running, int]  # request -> its tokens that a step computes

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
