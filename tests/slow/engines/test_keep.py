"""Engines keep the blocks of requests for as long as these say."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvroute.contract.keep import Order, RetentionHint
from tests.support.engines import BLOCK, Running, prompt_of
from tests.support.engines import request_of as completion_of
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

ONE_SHOT = RetentionHint(Order.UNLIKELY)
LATER = 20 * BLOCK  # tokens of a prompt that comes back


@pytest_asyncio.fixture(loop_scope="session")
async def cache(running: Running) -> AsyncIterator[Running]:
    """An empty cache."""
    assert await running.engine.reset_prefix_cache()
    await running.compare()
    yield running
    assert (await running.compare()).drift == 0
    assert await running.engine.reset_prefix_cache()


async def ask(running: Running, prompt: list[int], keep: RetentionHint | None) -> int:
    """Returns the tokens that were cached."""
    request = replace(completion_of(prompt, max_tokens=1), keep=keep)
    return (await running.run(request))[0].cached_tokens


async def evict(
    running: Running, blocks: int, keep: RetentionHint | None = ONE_SHOT, *, seed: int = 1000
) -> None:
    """Other prompts fill the cache, and evict about as many blocks."""
    missing = running.engine.facts.capacity_blocks - len(running.table) + blocks
    for number in range(missing // 20):
        await ask(running, prompt_of(20 * BLOCK, seed + number), keep)


async def test_what_comes_back_outlives_prompts_that_do_not(cache: Running) -> None:
    first, second = prompt_of(LATER, seed=301), prompt_of(LATER, seed=302)
    await ask(cache, first, RetentionHint(session=1))
    await ask(cache, second, ONE_SHOT)
    await evict(cache, 3 * cache.engine.facts.capacity_blocks)
    assert await ask(cache, [*first, 0], None) == LATER
    assert await ask(cache, [*second, 0], None) == 0


async def test_with_nothing_said_the_oldest_goes_first(cache: Running) -> None:
    first = prompt_of(LATER, seed=303)
    await ask(cache, first, None)
    await evict(cache, 40, keep=None)
    assert await ask(cache, [*first, 0], None) == 0


async def test_the_blocks_of_a_session_that_has_ended_go_first(cache: Running) -> None:
    stays, ends = prompt_of(LATER, seed=304), prompt_of(LATER, seed=305)
    await ask(cache, stays, RetentionHint(session=1))
    await ask(cache, ends, RetentionHint(session=2))
    await cache.engine.end_session(2)
    await cache.engine.end_session(3)  # nobody's
    await until(lambda: len(cache.table) >= 40)
    await evict(cache, 20, keep=None)
    assert await ask(cache, [*stays, 0], None) == LATER
    assert await ask(cache, [*ends, 0], None) < LATER


async def test_a_request_can_be_the_last_of_its_session(cache: Running) -> None:
    stays, ends = prompt_of(LATER, seed=306), prompt_of(LATER, seed=307)
    await ask(cache, stays, RetentionHint(session=1))
    await ask(cache, ends, RetentionHint(Order.ENDED, session=2))
    await until(lambda: len(cache.table) >= 40)
    await evict(cache, 20, keep=None)
    assert await ask(cache, [*stays, 0], None) == LATER
    assert await ask(cache, [*ends, 0], None) < LATER
