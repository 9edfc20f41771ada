"""Lets features limit the prompt tokens of each scheduler step, and learn how long steps take.

Before vLLM allocates blocks for a request, it calls a method that kvroute replaces, and that says
how many tokens the request may get (lane.py). If a version of vLLM no longer calls it, features
limit nothing.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from vllm.v1.request import Request

from kvroute.contract.generation import GenerateRequest
from kvroute.features.engine_feature import (
    NO_DATA,
    PROMPTS,
    ComputedPart,
    EngineFeatures,
    PendingPrompt,
    data_of,
)
from kvroute.features.engine_sides import engine_features
from kvroute.replica.vllm_engine.core.lane import gets_next_token, is_prompt, tokens_within
from kvroute.replica.vllm_engine.core.priority import is_in_lane

# Key in the extra_args of vLLM's SamplingParams. The value is a _RequestFacts as a plain list.
FACTS = "kvroute_step"
UNENDED = 8  # most steps that are planned and have not ended; vLLM plans only a few ahead


class _RequestFacts(NamedTuple):
    """What a request carries for the features in the scheduler."""

    expected_tokens: int = 0  # how many tokens of its prompt the router expects in the cache
    data: Mapping[str, bytes] = NO_DATA  # name of a feature -> its data


NO_FACTS = _RequestFacts()


@cache
def has_limits() -> bool:
    """Return whether a feature limits the steps of the engines that this process starts."""
    return engine_features(os.environ).has_any


def step_args(request: GenerateRequest) -> dict[str, Any]:
    """Return the entry of vLLM's extra_args for the features in the scheduler."""
    if not has_limits():
        return {}
    return {FACTS: [request.expected_tokens, dict(data_of(request))]}


class _Planned(NamedTuple):
    """A step that has been planned."""

    plan: Any  # vLLM's SchedulerOutput
    began_s: float  # time at which it was planned
    parts: list[ComputedPart]  # the parts of prompts that the step computes


class StepLimits:
    """The features in one scheduler."""

    def __init__(self, scheduler: Any, features: EngineFeatures) -> None:
        self._scheduler = scheduler
        self._features = features
        self._left = 0  # prompt tokens that this step may still compute
        self._parts: dict[str, ComputedPart] = {}  # id of a request -> what it may get in this step
        self._planned = deque[_Planned](maxlen=UNENDED)
        self._ended_s = 0.0  # time at which the latest step ended

    def begin_step(self) -> None:
        """Ask the features how many prompt tokens this step may compute."""
        self._parts = {}
        self._left = self._features.prompt_tokens(
            self._scheduler.max_num_scheduled_tokens,
            answers=lambda: [
                _facts(each).data for each in self._scheduler.running if not is_prompt(each)
            ],
            prompts=lambda: islice(self._pending(), PROMPTS),
        )

    def tokens(self, request: Request, computed: int, tokens: int) -> int:
        """Return how many tokens a request may get in this step; 0: it has to wait.

        Args:
            computed: the request's tokens that are computed, or were found in the cache.
            tokens: the tokens that vLLM would give to the request.
        """
        if gets_next_token(request, computed):
            return tokens
        allowed = tokens_within(self._left, tokens, self._scheduler)
        self._left -= allowed
        self._parts[request.request_id] = ComputedPart(computed, computed + allowed)
        return allowed

    def end_plan(self, plan: Any) -> None:
        """Record that vLLM has planned the step."""
        parts = [
            part
            for id_, part in self._parts.items()
            if part.end > part.start and id_ in plan.num_scheduled_tokens
        ]
        self._planned.append(_Planned(plan, time.monotonic(), parts))

    def end_step(self, plan: Any) -> None:
        """Tell the features how long a step took, which may have been planned long ago."""
        now_s = time.monotonic()
        while self._planned:
            planned = self._planned.popleft()
            if planned.plan is plan:
                took_s = now_s - max(planned.began_s, self._ended_s)
                self._features.step_ended(took_s, planned.parts)
                break
        self._ended_s = now_s

    def _pending(self) -> Iterator[PendingPrompt]:
        """Yield the prompts that are not computed, in the order of their computation."""
        now_s, clock_s = time.monotonic(), time.time()
        for request in self._scheduler.running:
            if is_prompt(request) and not is_in_lane(request.priority, now_s):
                yield _pending_prompt(request, clock_s)
        for request in self._scheduler.waiting:
            if is_in_lane(request.priority, now_s):
                return
            yield _pending_prompt(request, clock_s)


def _pending_prompt(request: Request, clock_s: float) -> PendingPrompt:
    start = max(request.num_computed_tokens, _facts(request).expected_tokens)
    return PendingPrompt(
        min(start, request.num_tokens), request.num_tokens, clock_s - request.arrival_time
    )


def _facts(request: Request) -> _RequestFacts:
    params = request.sampling_params
    plain = params and params.extra_args and params.extra_args.get(FACTS)
    return _RequestFacts(*plain) if plain else NO_FACTS
