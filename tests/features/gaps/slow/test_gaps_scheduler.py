"""How vLLM's scheduler asks features for the prompt tokens of a step; there is no model."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvroute.contract.generation import NO_TOKENS, GenerateRequest
from kvroute.features.engine_feature import (
    ComputedPart,
    EngineFeature,
    EngineFeatures,
    PendingPrompt,
)
from kvroute.features.gaps import LIMITS
from tests.support import schedulers
from tests.support.schedulers import BLOCK, step

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

STEP = 1024  # the most tokens of a step


class Recorder(EngineFeature):
    """Limits each step to `most` prompt tokens, and records what it is told."""

    name = "recorder"
    most: int | None = 100

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[bytes], list[tuple[int, int]]]] = []
        self.ended: list[Sequence[ComputedPart]] = []

    def prompt_tokens(
        self, answers: Sequence[bytes], prompts: Sequence[PendingPrompt]
    ) -> int | None:
        self.asked.append((answers, [(each.start, each.end) for each in prompts]))
        return self.most

    def step_ended(self, took_s: float, parts: Sequence[ComputedPart]) -> None:
        assert took_s > 0.0
        self.ended.append(parts)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    from kvroute.replica.vllm_engine.core.scheduler import KvrouteScheduler
    from tests.support.kv_managers import full

    monkeypatch.setenv(LIMITS, "30 1500")
    return schedulers.scheduler_of(
        KvrouteScheduler,
        full(BLOCK),
        blocks=1000,
        max_num_batched_tokens=STEP,
        scheduling_policy="priority",
    )


@pytest.fixture
def recorder(scheduler: Any) -> Recorder:
    from kvroute.replica.vllm_engine.core.step_limits import StepLimits

    recorder = Recorder()
    scheduler.step_limits = StepLimits(scheduler, EngineFeatures([recorder]))
    return recorder


def add(scheduler: Any, name: str, tokens: int, facts: list[Any] | None = None) -> None:
    from kvroute.replica.vllm_engine.core.step_limits import FACTS

    extra = {FACTS: facts} if facts else None
    first_id = 1000 * (sum(map(ord, name)) % 100)
    request = schedulers.request_of(name, tokens=tokens, first_id=first_id, extra_args=extra)
    scheduler.add_request(request)


def test_the_feature_is_in_the_scheduler_only_if_it_is_on(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvroute.replica.vllm_engine.core.scheduler import KvrouteScheduler
    from tests.support.kv_managers import full

    assert scheduler.step_limits is not None
    monkeypatch.delenv(LIMITS)
    off = schedulers.scheduler_of(KvrouteScheduler, full(BLOCK), blocks=10)
    assert off.step_limits is None


def test_a_limit_cuts_prompts_and_never_answers(scheduler: Any, recorder: Recorder) -> None:
    recorder.most = None
    add(scheduler, "prompt", 2000)  # it is before the answers, which could starve behind it
    for name in ("a", "b"):
        add(scheduler, name, 20)
    assert step(scheduler) == {"prompt": STEP}
    recorder.most = 100
    assert step(scheduler) == {"prompt": 100}
    recorder.most = 10_000
    assert step(scheduler) == {"prompt": 2000 - STEP - 100, "a": 20, "b": 20}
    recorder.most = 0
    add(scheduler, "late", 500)
    assert step(scheduler) == {"prompt": 1, "a": 1, "b": 1}
    recorder.most = 30
    assert step(scheduler) == {"prompt": 1, "a": 1, "b": 1, "late": 30}


def test_features_learn_what_each_step_has_computed(scheduler: Any, recorder: Recorder) -> None:
    add(scheduler, "a", 150)
    add(scheduler, "b", 90)
    for _ in range(4):
        step(scheduler)
    assert recorder.ended == [
        [ComputedPart(0, 100)],
        [ComputedPart(100, 150), ComputedPart(0, 50)],
        [ComputedPart(50, 90)],
        [],
    ]


def test_features_get_the_data_of_answers_and_what_is_expected_to_be_cached(
    scheduler: Any, recorder: Recorder
) -> None:
    recorder.most = None
    add(scheduler, "a", 20, [0, {"recorder": b"20", "other": b"1"}])
    step(scheduler)
    add(scheduler, "b", 300, [256, {}])
    add(scheduler, "c", 40)
    step(scheduler)
    assert recorder.asked == [([], [(0, 20)]), ([b"20"], [(256, 300), (0, 40)])]


def test_a_request_carries_its_facts_only_if_a_feature_is_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvroute.replica.vllm_engine.core.step_limits import FACTS, has_limits, step_args

    request = GenerateRequest("r", NO_TOKENS, expected_tokens=32, features={"gaps": b"20"})
    for limits, expected in (("", {}), ("30 1500", {FACTS: [32, {"gaps": b"20"}]})):
        monkeypatch.setenv(LIMITS, limits)
        has_limits.cache_clear()
        assert step_args(request) == expected
    has_limits.cache_clear()
