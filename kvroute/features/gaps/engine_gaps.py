"""Limits the prompt tokens of an engine's steps, so that answers get their tokens in time.

While answers run, a step takes at most as long as the strictest of them allows. But prompts get the
share of the time that they need for first tokens in time, even if steps become longer.
"""

import math
from collections.abc import Sequence

from kvroute.features.engine_feature import ComputedPart, EngineFeature, PendingPrompt
from kvroute.features.gaps.step_times import StepTimes

# Prompts get at least this fraction of the time of a step without prompts, even if such a step
# alone exceeds the limit. So they are computed, if slowly.
SMALLEST_PART = 0.1
# Prompts that are late get this share of the time. So a step takes at most the limit, or 20 times
# a step without prompts, whichever is longer. And the engine computes nearly as many prompt tokens
# per second as without a limit: in replays, 0.9 is worse for first tokens, and 0.98 for gaps.
LARGEST_SHARE = 0.95


class EngineGaps(EngineFeature):
    """The limit of one engine.

    Args:
        tpot_s: the most seconds between two tokens of an answer.
        ttft_s: the most seconds from a prompt's arrival at the engine to its first token.
    """

    name = "gaps"

    def __init__(self, *, tpot_s: float, ttft_s: float) -> None:
        self.times = StepTimes()
        self._tpot_s = tpot_s
        self._ttft_s = ttft_s

    def prompt_tokens(
        self, answers: Sequence[bytes], prompts: Sequence[PendingPrompt]
    ) -> int | None:
        times, limit_s = self.times, min(map(self._limit_s, answers), default=math.inf)
        if not prompts or limit_s == math.inf or not (times.fixed_s and times.token_s):
            return None
        share = min(LARGEST_SHARE, self._needed_share(prompts))
        needed_s = share / (1.0 - share) * times.fixed_s
        least_s = SMALLEST_PART * times.fixed_s
        seconds = max(limit_s - times.fixed_s, needed_s, least_s)
        return max(1, times.tokens_in(seconds, prompts[0].start))

    def step_ended(self, took_s: float, parts: Sequence[ComputedPart]) -> None:
        self.times.learn(took_s, parts)

    def _limit_s(self, data: bytes) -> float:
        """Return the most seconds between the tokens of an answer.

        Args:
            data: the request's own limit in milliseconds, as digits. Empty: the default. 0: no
                limit.
        """
        if not data:
            return self._tpot_s
        return int(data) / 1000 or math.inf

    def _needed_share(self, prompts: Sequence[PendingPrompt]) -> float:
        """Return the share of the time that prompts need for their first tokens to be in time.

        A prompt needs the time of all prompts before it, too. 1: not all of them can be in time.
        """
        share, seconds = 0.0, 0.0
        for prompt in prompts:
            seconds += self.times.prompt_s(prompt.start, prompt.end)
            left_s = self._ttft_s - prompt.waited_s
            if seconds >= left_s:
                return 1.0
            share = max(share, seconds / left_s)
        return share
