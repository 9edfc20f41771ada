"""Pulls between two engines of which one fails, or the link between them: the text is the same.

The tests run in order: the last ones kill the engines.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvroute.contract.generation import Chunk, EngineDeadError
from kvroute.replica.fabric.pull import Pull, PullResult, carried
from tests.support.answers import ids_of
from tests.support.engines import (
    BLOCK,
    PULL_KEY,
    PULLING,
    Running,
    prompt_of,
    pull_results,
    request_of,
    started,
)
from tests.support.links import Faults, link
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

BLOCKS = 20
PROMPT = BLOCKS * BLOCK  # tokens
LONG_S = 60.0
LIMIT_S = 1.0  # time of a pull from a peer that hangs
MARGIN_S = 5.0  # what a busy machine may add to it
MB = 1_000_000
AT = 5 * MB  # a position in the fourth block
WHOLE = 3  # the blocks before it
BEGUN = MB // 2  # bytes after which a pull has certainly begun
OPTIONS: dict[str, Any] = {"host_cache_gb": "0.4", "replica_features": PULLING}


class Pair(NamedTuple):
    """Two engines, and the processes of their schedulers and block servers."""

    peer: Running
    own: Running
    peer_core: psutil.Process
    own_core: psutil.Process


def cores() -> set[psutil.Process]:
    """Return the processes of vLLM's schedulers."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "EngineCore" in " ".join(process.cmdline()):
                found.add(process)
    return found


def shared_memory() -> set[str]:
    """Return the files of host memory that have a name."""
    return {path.name for path in Path("/dev/shm").iterdir() if "offload" in path.name}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[Pair]:
    before = shared_memory()
    async with started("vllm", **OPTIONS) as peer:
        (peer_core,) = cores()
        async with started("vllm", **OPTIONS) as own:
            (own_core,) = cores() - {peer_core}
            yield Pair(peer, own, peer_core, own_core)
    assert shared_memory() == before


async def answer(running: Running, prompt: list[int], pull: Pull | None = None) -> list[Chunk]:
    return await running.run(replace(request_of(prompt, max_tokens=16), features=carried(pull)))


async def filled(pair: Pair, seed: int) -> tuple[list[int], list[int]]:
    """Compute a prompt at the peer, and return it with its answer when host memory has it."""
    before, prompt = len(pair.peer.table.in_host), prompt_of(PROMPT, seed)
    chunks = await answer(pair.peer, prompt)
    await until(lambda: len(pair.peer.table.in_host) >= before + BLOCKS)
    return prompt, ids_of(chunks)


def pull_from(pair: Pair, address: str = "", within_s: float = LONG_S, name: str = "p") -> Pull:
    address = address or pair.peer.exchanger.exchanging().address
    return Pull(name, address, PULL_KEY, PROMPT, within_s)


def check(chunks: list[Chunk], computed: list[int], within_s: float = LONG_S) -> PullResult:
    """Check the text and the pull's time, and return the pull's result."""
    (result,) = pull_results(chunks)
    assert ids_of(chunks) == computed
    assert chunks[0].cached_tokens == result.tokens
    assert result.took_s < within_s + MARGIN_S
    return result


@pytest.mark.parametrize(
    ("faults", "within_s", "reason", "seed"),
    [
        (Faults(damaged_at=AT), LONG_S, "damaged", 10),
        (Faults(cut_at=AT), LONG_S, "lost", 11),
        (Faults(hangs_at=AT), 5 * LIMIT_S, "late", 12),
    ],
    ids=["wrong bytes", "cut half-way", "hangs half-way"],
)
async def test_blocks_before_a_fault_of_the_link_are_used_and_the_rest_is_computed(
    engines: Pair, faults: Faults, within_s: float, reason: str, seed: int
) -> None:
    prompt, computed = await filled(engines, seed)
    with link(engines.peer.exchanger.exchanging().address, faults) as through:
        pull = pull_from(engines, through.address, within_s, name=reason)
        result = check(await answer(engines.own, prompt, pull), computed, within_s)
    assert (result.tokens, result.reason) == (WHOLE * BLOCK, reason)
    again = await answer(engines.own, [*prompt, 7], pull_from(engines))
    assert again[0].cached_tokens == PROMPT
    assert (await engines.own.compare()).drift == 0


async def test_a_slow_link_is_given_up_at_the_limit(engines: Pair) -> None:
    prompt, computed = await filled(engines, 1)
    slow = Faults(bytes_per_s=10 * MB)
    with link(engines.peer.exchanger.exchanging().address, slow) as through:
        pull = pull_from(engines, through.address, LIMIT_S, name="slow")
        result = check(await answer(engines.own, prompt, pull), computed, LIMIT_S)
    assert result.reason == "late"
    assert result.tokens < PROMPT - BLOCK


async def test_blocks_that_disappear_at_the_peer_are_computed(engines: Pair) -> None:
    prompt, computed = await filled(engines, 2)
    slow = Faults(bytes_per_s=5 * MB)
    with link(engines.peer.exchanger.exchanging().address, slow) as through:
        pull = pull_from(engines, through.address, name="clears")
        waiting = asyncio.create_task(answer(engines.own, prompt, pull))
        await until(lambda: through.sent_bytes > BEGUN)
        assert await engines.peer.engine.reset_prefix_cache()
        result = check(await waiting, computed)
    assert result.reason == "gone"
    assert result.tokens < PROMPT - BLOCK


async def test_a_frozen_peer_is_given_up_at_the_limit(engines: Pair) -> None:
    prompt, computed = await filled(engines, 3)
    engines.peer_core.suspend()
    try:
        pull = pull_from(engines, within_s=LIMIT_S, name="frozen")
        result = check(await answer(engines.own, prompt, pull), computed, LIMIT_S)
    finally:
        engines.peer_core.resume()
    assert (result.tokens, result.reason) == (0, "late")
    again = await answer(engines.peer, prompt)
    assert ids_of(again) == computed


async def test_a_peer_that_freezes_during_a_pull_is_given_up_at_the_limit(engines: Pair) -> None:
    prompt, computed = await filled(engines, 4)
    slow = Faults(bytes_per_s=20 * MB)
    with link(engines.peer.exchanger.exchanging().address, slow) as through:
        pull = pull_from(engines, through.address, LIMIT_S, name="freezes")
        waiting = asyncio.create_task(answer(engines.own, prompt, pull))
        await until(lambda: through.sent_bytes > BEGUN)
        engines.peer_core.suspend()
        try:
            result = check(await waiting, computed, LIMIT_S)
        finally:
            engines.peer_core.resume()
    assert result.reason == "late"


async def test_a_peer_that_is_killed_during_a_pull(engines: Pair) -> None:
    prompt, computed = await filled(engines, 5)
    slow = Faults(bytes_per_s=5 * MB)
    with link(engines.peer.exchanger.exchanging().address, slow) as through:
        waiting = asyncio.create_task(
            answer(engines.own, prompt, pull_from(engines, through.address, name="dies"))
        )
        await until(lambda: through.sent_bytes > BEGUN)
        engines.peer_core.kill()
        result = check(await waiting, computed)
    assert result.reason == "lost"
    other = prompt_of(PROMPT, 6)
    dead = await answer(engines.own, other, pull_from(engines, name="dead"))
    assert ids_of(dead) == ids_of(await answer(engines.own, other))
    (result,) = pull_results(dead)
    assert (result.tokens, result.reason) == (0, "lost")
    assert (await engines.own.compare()).drift == 0


async def test_both_ends_are_killed(engines: Pair) -> None:
    """The request fails with its engine, and another engine gives the same answer."""
    prompt = prompt_of(PROMPT, 7)
    computed = ids_of(await answer(engines.own, prompt))
    pull = pull_from(engines, name="both")
    waiting = asyncio.create_task(answer(engines.own, prompt_of(PROMPT, 8), pull))
    engines.own_core.kill()
    with pytest.raises(EngineDeadError):
        await waiting
    async with started("vllm", **OPTIONS) as later:
        chunks = await answer(later, prompt, pull)
        assert check(chunks, computed).reason == "lost"
