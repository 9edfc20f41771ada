"""Blocks that a request gives back while it runs are kept as it says; there is no model."""

from typing import Any

import pytest

from kvroute.contract.generation import NO_TOKENS, GenerateRequest
from kvroute.contract.keep import KEEP, Keep
from tests.support.schedulers import BLOCK, request_of, scheduler_of, step

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

PROMPT, ANSWER = 100, 80  # tokens; the answer is longer than the windows
BLOCKS = 60
PROMISE = Keep(0.0001, still_s=3600.0, session=1)
ONE_SHOT = Keep(0.01)
TOOLS = Keep(0.0, session=1, tool_chance=1.0, tool_s=60.0)
GROUPS: dict[str, list[tuple[Any, ...]]] = {
    "window": [("full", BLOCK), ("window", BLOCK, 40)],
    "chunk": [("full", BLOCK), ("chunk", BLOCK, 64)],
    "states": [("full", BLOCK), ("state", BLOCK), ("state", BLOCK)],
}


class Side:
    """A scheduler that answers one request at a time."""

    def __init__(self, groups: str, **options: Any) -> None:
        from kvroute.replica.vllm_engine.core.scheduler import KvrouteScheduler
        from tests.support import kv_managers

        specs = [getattr(kv_managers, kind)(*sizes) for kind, *sizes in GROUPS[groups]]
        if groups == "states":
            options["mamba_cache_mode"] = "align"
        self.scheduler = scheduler_of(KvrouteScheduler, *specs, blocks=BLOCKS, **options)
        self.clock_s = 0.0
        for queue in self.scheduler.keeping._queues.values():
            queue._clock = lambda: self.clock_s

    def answer(self, name: str, first_id: int, keep: Keep | None) -> Any:
        self.begin(name, first_id, keep)
        while name in self.scheduler.requests:
            self.step()

    def begin(self, name: str, first_id: int, keep: Keep | None) -> None:
        from kvroute.replica.vllm_engine.blocks.keeping import keep_args

        args = keep_args(GenerateRequest(name, NO_TOKENS, keep=keep))
        sizes = {"tokens": PROMPT, "first_id": first_id, "max_tokens": ANSWER}
        self.scheduler.add_request(request_of(name, **sizes, extra_args=args))

    def step(self) -> None:
        self.clock_s += 0.01
        step(self.scheduler)

    def fill(self, keep: Keep | None) -> None:
        """Three times the cache."""
        for number in range(1, 4 * BLOCKS * BLOCK // (PROMPT + ANSWER)):
            self.answer(f"other{number}", 1000 * number, keep)

    def cached(self, first_id: int) -> int:
        """Tokens of that prompt."""
        request = request_of("again", tokens=PROMPT, first_id=first_id)
        coordinator = self.scheduler.kv_cache_manager.coordinator
        return int(coordinator.find_longest_cache_hit(request.block_hashes, PROMPT - 1)[1])


@pytest.fixture(params=GROUPS)
def side(request: pytest.FixtureRequest) -> Side:
    return Side(request.param)


def test_a_promise_is_kept_though_the_answer_has_left_the_prompts_window(side: Side) -> None:
    side.answer("a", 0, PROMISE)
    assert side.cached(0) == PROMPT // BLOCK * BLOCK
    side.fill(None)
    assert side.cached(0) == PROMPT // BLOCK * BLOCK


def test_a_session_that_ends_during_a_turn_is_over_for_what_that_leaves(side: Side) -> None:
    likely = Keep(session=1, tool_s=60.0)
    side.answer("a", 0, likely)
    side.begin("b", 1000, likely)
    side.begin("other", 2000, Keep(session=2))
    for _ in range(5):
        side.step()
    side.scheduler.end_session(1)
    while side.scheduler.requests:
        side.step()
    side.scheduler.label_again("b", likely.after_tool_call)
    side.fill(ONE_SHOT)
    assert side.cached(0) == side.cached(1000) == 0 < side.cached(2000)
    assert sum(each.ended for each in side.scheduler.keeping.evictions()) >= 2 * PROMPT // BLOCK


@pytest.mark.parametrize("interval", [None, 0], ids=["dense", "sparse"])
def test_nothing_of_one_shot_prompts_outlives_what_comes_back(interval: int | None) -> None:
    side = Side("window", prefix_cache_retention_interval=interval)
    side.answer("a", 0, Keep(session=1))
    [*side.scheduler.keeping.evictions()]
    side.fill(ONE_SHOT)
    evicted = [*side.scheduler.keeping.evictions()]
    assert sum(each.usual for each in evicted) == 0 < sum(each.unlikely for each in evicted)
    assert side.cached(0) == PROMPT // BLOCK * BLOCK


def test_a_tool_call_keeps_what_the_answer_has_left_behind(side: Side) -> None:
    side.answer("a", 0, TOOLS)
    side.scheduler.keeping.label_again("a", TOOLS.after_tool_call)
    side.fill(None)
    assert side.cached(0) == PROMPT // BLOCK * BLOCK


def test_of_running_requests_no_more_is_remembered_than_the_cache_has() -> None:
    side = Side("window", prefix_cache_retention_interval=None)
    keeping, most = side.scheduler.keeping, 0
    for number in range(40):
        side.answer(f"r{number}", 1000 * number, TOOLS)
        held = [
            block for each in keeping._recent.values() for some in each for block in some.blocks
        ]
        assert len(held) == keeping._recent_blocks <= keeping._most_blocks
        most = max(most, len(held))
    assert most > BLOCKS // 2


def test_with_full_attention_alone_vllms_methods_stay_as_they_are() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    from kvroute.replica.vllm_engine.core.scheduler import KvrouteScheduler
    from tests.support.kv_managers import full

    scheduler = scheduler_of(KvrouteScheduler, full(BLOCK), blocks=BLOCKS)
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    assert type(manager) is FullAttentionManager
    assert type(manager.block_pool) is BlockPool


def test_with_nothing_said_nothing_is_gathered(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    queues = side.scheduler.keeping._queues.values()
    said: list[Keep] = []
    for queue in queues:
        monkeypatch.setattr(queue, "label", lambda blocks, keep: said.append(keep))
    side.answer("a", 0, None)
    side.answer("b", 1000, KEEP)
    assert said == []
    side.answer("c", 2000, PROMISE)
    assert {*said} == {PROMISE}
    side.answer("d", 3000, None)  # it may share blocks with what was said
    assert {*said} == {PROMISE, KEEP}
