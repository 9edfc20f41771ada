"""Learns how long the steps of one engine take, from the steps that have ended."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvroute.features.engine_feature import ComputedPart

LATEST = 1 / 8  # weight of a new value in the moving average of steps without prompts
FADE = 0.97  # factor by which each step with a prompt reduces the weight of those before it
# Measured times above this multiple of the expected time have another cause, and are cut to it.
MAX_OFF = 4.0
# The smallest determinant of the equations, as a share of the product of their diagonal, at which
# the cost of tokens and the cost of attention can be told apart.
MIN_DIFFERENCE = 1e-3


@dataclass(slots=True)
class StepTimes:
    """The times of steps: a fixed time, and the time of the prompt tokens.

    A step that computes the tokens [start, end) of a prompt takes fixed_s + token_s * (end - start)
    + context_s * (end**2 - start**2) / 2. The last part is the attention to the tokens before.
    """

    fixed_s: float = 0.0  # time of a step that computes no prompt; 0: unknown
    token_s: float = 0.0  # time of a prompt token without the attention; 0: unknown
    context_s: float = 0.0  # time of a prompt token's attention to one token before it
    # The sums of the least squares, faded by FADE, over steps with prompts: tokens, contexts,
    # contexts**2 / tokens, seconds, seconds * contexts / tokens. The contexts of a step are the sum
    # over its prompt tokens of the number of tokens before each. A step has the weight 1/tokens,
    # so that short steps count as well.
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def learn(self, took_s: float, parts: Sequence[ComputedPart]) -> None:
        """Record the time of a step, and what it has computed of prompts."""
        if not parts:
            if self.fixed_s:
                took_s = min(took_s, MAX_OFF * self.fixed_s)
                self.fixed_s += LATEST * (took_s - self.fixed_s)
            else:
                self.fixed_s = took_s
            return
        tokens = sum([part.end - part.start for part in parts])
        contexts = sum([part.end**2 - part.start**2 for part in parts]) / 2
        seconds = max(0.0, took_s - self.fixed_s)
        if self.token_s:
            expected_s = self.token_s * tokens + self.context_s * contexts
            seconds = min(seconds, MAX_OFF * (self.fixed_s + expected_s))
        new = (tokens, contexts, contexts * contexts / tokens, seconds, seconds * contexts / tokens)
        self._sums = [FADE * old + each for old, each in zip(self._sums, new, strict=True)]
        self._solve()

    def _solve(self) -> None:
        """Compute the times from the sums."""
        tokens, both, contexts, seconds, context_seconds = self._sums
        determinant = tokens * contexts - both * both
        self.token_s, self.context_s = seconds / tokens, 0.0
        if determinant > MIN_DIFFERENCE * tokens * contexts:
            token_s = (seconds * contexts - context_seconds * both) / determinant
            context_s = (tokens * context_seconds - both * seconds) / determinant
            if token_s > 0.0 and context_s > 0.0:
                self.token_s, self.context_s = token_s, context_s

    def prompt_s(self, start: int, end: int) -> float:
        """Return the time to compute the tokens [start, end) of a prompt, without fixed times."""
        return self.token_s * (end - start) + self.context_s * (end**2 - start**2) / 2

    def tokens_in(self, seconds: float, start: int) -> int:
        """Return how many tokens of a prompt are computed in this time, from `start` on."""
        first_s = self.token_s + self.context_s * start  # time of the first of these tokens
        if not first_s:
            return 0
        # The solution of prompt_s(start, start + tokens) = seconds.
        root = math.sqrt(first_s**2 + 2 * self.context_s * seconds)
        return int(2 * seconds / (first_s + root))
