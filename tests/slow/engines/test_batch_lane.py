"""How vLLM's scheduler divides its steps between batch requests and others; there is no model."""

from typing import Any

import pytest

from kvroute.contract.priority import BATCH_S, STEP_PARTS
from tests.support import schedulers
from tests.support.schedulers import BLOCK, step

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

STEP = 1024  # the most tokens of a step
LANE = STEP // STEP_PARTS
NOW_S = 1000.0


@pytest.fixture
def scheduler() -> Any:
    from kvroute.replica.vllm_engine.core.scheduler import KvrouteScheduler
    from tests.support.kv_managers import full

    scheduler = schedulers.scheduler_of(
        KvrouteScheduler,
        full(BLOCK),
        blocks=1000,
        max_num_batched_tokens=STEP,
        scheduling_policy="priority",
    )
    scheduler.lane.clock = lambda: NOW_S
    return scheduler


def request_of(name: str, tokens: int, *, is_batch: bool = False) -> Any:
    """Return a request that arrives now."""
    from kvroute.replica.vllm_engine.core.priority import UNITS_PER_S

    first_id = 1000 * (sum(map(ord, name)) % 100)
    due_s = NOW_S + (BATCH_S if is_batch else 0.0)
    priority = 2 * round(due_s * UNITS_PER_S) + is_batch
    return schedulers.request_of(name, tokens=tokens, first_id=first_id, priority=priority)


def test_a_batch_alone_uses_whole_steps(scheduler: Any) -> None:
    for name in ("a", "b"):
        scheduler.add_request(request_of(name, 700, is_batch=True))
    assert step(scheduler) == {"a": 700, "b": STEP - 700}
    assert step(scheduler) == {"a": 1, "b": 1400 - STEP}


def test_beside_a_decode_one_batch_prompt_gets_the_lane(scheduler: Any) -> None:
    scheduler.add_request(request_of("chat", 100))
    assert step(scheduler) == {"chat": 100}
    for name in ("a", "b"):
        scheduler.add_request(request_of(name, LANE + 40, is_batch=True))
    assert step(scheduler) == {"chat": 1, "a": LANE}
    assert step(scheduler) == {"chat": 1, "a": 40, "b": LANE - 40}
    assert step(scheduler) == {"chat": 1, "a": 1, "b": LANE}


def test_a_batch_prompt_that_has_begun_gives_way_to_others(scheduler: Any) -> None:
    scheduler.add_request(request_of("a", 3000, is_batch=True))
    assert step(scheduler) == {"a": STEP}
    scheduler.add_request(request_of("chat", STEP + 100))
    assert step(scheduler) == {"chat": STEP}
    assert step(scheduler) == {"chat": 100}
    assert step(scheduler) == {"chat": 1, "a": LANE}
    scheduler.finish_requests("chat", _aborted())
    assert step(scheduler) == {"a": STEP}


def test_batch_answers_continue_beside_others(scheduler: Any) -> None:
    scheduler.add_request(request_of("a", 50, is_batch=True))
    assert step(scheduler) == {"a": 50}
    scheduler.add_request(request_of("chat", 2 * STEP))
    assert step(scheduler) == {"a": 1, "chat": STEP - 1}


def test_no_batch_request_is_admitted_while_another_waits(scheduler: Any) -> None:
    scheduler.add_request(request_of("chat", STEP))
    scheduler.add_request(request_of("other", STEP))
    scheduler.add_request(request_of("a", 10, is_batch=True))
    assert step(scheduler) == {"chat": STEP}
    assert step(scheduler) == {"chat": 1, "other": STEP - 1}
    assert step(scheduler) == {"chat": 1, "other": 1, "a": 10}


def test_a_batch_request_leaves_the_lane_after_a_time(scheduler: Any) -> None:
    scheduler.add_request(request_of("chat", 100))
    step(scheduler)
    scheduler.add_request(request_of("a", 700, is_batch=True))
    scheduler.lane.clock = lambda: NOW_S + BATCH_S + 1.0
    assert step(scheduler) == {"chat": 1, "a": 700}


def test_batch_requests_are_preempted_if_another_request_lacks_blocks(scheduler: Any) -> None:
    for name in ("a", "b", "c"):
        scheduler.add_request(request_of(name, 5000, is_batch=True))
    for _ in range(15):
        step(scheduler)  # the three hold 940 of 1,000 blocks
    scheduler.add_request(request_of("chat", 1200))
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1}
    assert step(scheduler) == {"a": 1, "b": 1, "chat": STEP - 2}
    assert step(scheduler) == {"a": 1, "b": 1, "chat": 1200 - STEP + 2}
    scheduler.finish_requests("chat", _aborted())
    assert step(scheduler)["c"] > 0  # some of its blocks were not needed


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
