"""What vLLM's scheduler leaves in the cache of a request that it preempts; there is no model."""

from typing import Any

import pytest

from tests.support import schedulers
from tests.support.schedulers import BLOCK, request_of, step

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

STEP = 4 * BLOCK  # tokens of one prompt that a step computes


def scheduler_of(name: str, *, blocks: int) -> Any:
    """Of kvroute or of vLLM itself."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvroute.replica.vllm_engine.core.scheduler import KvrouteScheduler
    from tests.support.kv_managers import full

    kind: Any = {"kvroute": KvrouteScheduler, "vllm": Scheduler}[name]
    return schedulers.scheduler_of(
        kind,
        full(BLOCK),
        blocks=blocks,
        long_prefill_token_threshold=STEP,
        scheduling_policy="priority",
    )


@pytest.mark.parametrize(
    ("name", "found"),
    # vLLM's own blocks hold nothing there. Once it finds 128, ours need not override it.
    [("kvroute", 2 * STEP), ("vllm", 2 * STEP + 3 * BLOCK)],
)
def test_a_request_that_was_preempted_in_the_step_that_scheduled_it_finds_what_was_computed(
    name: str, found: int
) -> None:
    scheduler = scheduler_of(name, blocks=15)
    long = request_of("long", tokens=200, first_id=0, priority=9)
    scheduler.add_request(request_of("old", tokens=BLOCK, first_id=7000, priority=0))
    scheduler.add_request(long)
    assert step(scheduler) == {"old": BLOCK, "long": STEP}
    scheduler.add_request(request_of("young", tokens=BLOCK, first_id=5000, priority=1))
    assert step(scheduler) == {"old": 1, "long": STEP, "young": BLOCK}
    assert step(scheduler) == {"old": 1, "young": 1}  # it took the long one's last block
    coordinator = scheduler.kv_cache_manager.coordinator
    assert coordinator.find_longest_cache_hit(long.block_hashes, 200)[1] == found
