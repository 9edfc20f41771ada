"""Two engines: one copies a prompt's blocks from the other's host memory, whatever goes wrong."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvroute.contract.generation import Chunk, GenerateRequest
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
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

PROMPT = 20 * BLOCK  # tokens
LONG_S = 60.0
LONGEST = 4_096


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[tuple[Running, Running]]:
    own: dict[str, Any] = {
        "host_cache_gb": "0.6",
        "replica_features": PULLING,
        "kv_cache_memory_mb": 256,
        "max_model_len": LONGEST,
    }
    async with started("vllm", **own) as first, started("vllm", **own) as second:
        yield first, second


@pytest_asyncio.fixture(loop_scope="module")
async def pair(engines: tuple[Running, Running]) -> AsyncIterator[tuple[Running, Running]]:
    """Return a peer and an engine that pulls from it. Their tiers are empty."""
    for running in engines:
        assert await running.engine.reset_prefix_cache()
        await until(lambda running=running: len(running.table) == 0)  # type: ignore[misc]
    yield engines
    for running in engines:
        assert (await running.compare()).drift == 0


def pull_from(peer: Running, tokens: int, **fields: Any) -> Pull:
    pull = Pull("peer", peer.exchanger.exchanging().address, PULL_KEY, tokens, LONG_S)
    return replace(pull, **fields)


async def answer(running: Running, prompt: list[int], pull: Pull | None = None) -> list[Chunk]:
    return await running.run(replace(request_of(prompt, max_tokens=16), features=carried(pull)))


def pulled(chunks: list[Chunk]) -> PullResult:
    (result,) = pull_results(chunks)
    return result


async def filled(peer: Running, prompt: list[int]) -> list[Chunk]:
    """Compute a prompt at the peer, and wait until all its blocks are in host memory."""
    before = len(peer.table.in_host)
    chunks = await answer(peer, prompt)
    await until(lambda: len(peer.table.in_host) >= before + (len(prompt) + 16) // BLOCK - 1)
    return chunks


def test_the_engines_publish_where_they_serve_blocks(engines: tuple[Running, Running]) -> None:
    first, second = (running.exchanger for running in engines)
    assert first.exchanging().address != second.exchanging().address
    assert first.exchanging().format == second.exchanging().format != ""
    assert first.exchanging().bytes_per_s > 0
    assert first.exchanging().latency_s >= 0


@pytest.mark.parametrize("tokens", [500, 1_000, 2_000, 4_000])
async def test_pulled_computed_and_local_blocks_give_the_same_text(
    pair: tuple[Running, Running], tokens: int
) -> None:
    peer, own = pair
    prompt = prompt_of(tokens, tokens)
    computed = await filled(peer, prompt)
    blocks = (tokens - 1) // BLOCK
    first = await answer(own, prompt, pull_from(peer, tokens))
    result = pulled(first)
    assert (result.tokens // BLOCK, result.reason) == (blocks, "")
    assert result.size_bytes == result.tokens // BLOCK * own.engine.facts.host.block_bytes  # type: ignore[union-attr]
    assert first[0].cached_tokens == blocks * BLOCK
    again = await answer(own, prompt)
    assert ids_of(first) == ids_of(computed) == ids_of(again)
    await until(lambda: len(own.table.in_host) >= blocks)


async def test_blocks_that_the_engine_has_are_not_pulled(pair: tuple[Running, Running]) -> None:
    peer, own = pair
    prompt = prompt_of(PROMPT, 1)
    await filled(peer, prompt)
    await filled(own, prompt[: PROMPT // 2])
    chunks = await answer(own, [*prompt, 7], pull_from(peer, PROMPT))
    assert PROMPT // 2 - BLOCK <= pulled(chunks).tokens <= PROMPT // 2
    assert chunks[0].cached_tokens == PROMPT
    nothing = await answer(own, [*prompt, 7], pull_from(peer, PROMPT))
    assert pulled(nothing) == PullResult(0, 0, 0.0)


async def test_only_the_tokens_that_the_pull_names_are_pulled(
    pair: tuple[Running, Running],
) -> None:
    peer, own = pair
    prompt = prompt_of(PROMPT, 2)
    computed = await filled(peer, prompt)
    chunks = await answer(own, prompt, pull_from(peer, 5 * BLOCK))
    assert pulled(chunks).tokens == 5 * BLOCK
    assert chunks[0].cached_tokens == 5 * BLOCK
    assert ids_of(chunks) == ids_of(computed)


async def test_a_peer_with_a_part_of_the_blocks_gives_that_part(
    pair: tuple[Running, Running],
) -> None:
    peer, own = pair
    prompt = prompt_of(PROMPT, 3)
    await filled(peer, prompt[: 10 * BLOCK])
    chunks = await answer(own, prompt, pull_from(peer, PROMPT))
    assert (pulled(chunks).tokens, pulled(chunks).reason) == (10 * BLOCK, "gone")
    assert chunks[0].cached_tokens == 10 * BLOCK
    assert ids_of(chunks) == ids_of(await answer(peer, prompt))


async def test_tenants_do_not_get_each_others_blocks(pair: tuple[Running, Running]) -> None:
    peer, own = pair
    prompt = prompt_of(PROMPT, 4)
    await filled(peer, prompt)
    request = replace(
        request_of(prompt, "tenant", max_tokens=4), features=carried(pull_from(peer, PROMPT))
    )
    chunks = await own.run(request)
    assert (pulled(chunks).tokens, pulled(chunks).reason) == (0, "gone")
    assert chunks[0].cached_tokens == 0


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def hanging_up() -> Iterator[str]:
    """A server that closes each connection at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


async def check_computed(
    pair: tuple[Running, Running], seed: int, reasons: set[str], **fields: Any
) -> None:
    peer, own = pair
    prompt = prompt_of(PROMPT, seed)
    computed = await filled(peer, prompt)
    chunks = await answer(own, prompt, pull_from(peer, PROMPT, **fields))
    assert pulled(chunks).reason in reasons
    assert (pulled(chunks).tokens, chunks[0].cached_tokens) == (0, 0)
    assert ids_of(chunks) == ids_of(computed)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"address": "127.0.0.1:1"}, "lost"),
        ({"address": "nowhere"}, "lost"),
        ({"address": ""}, "lost"),
        ({"key": b"another"}, "refused"),
        ({"within_s": 0.0}, "late"),
    ],
)
async def test_a_pull_that_fails_is_computed(
    pair: tuple[Running, Running], fields: dict[str, Any], reason: str
) -> None:
    await check_computed(pair, 10, {reason}, replica_id=str(fields), **fields)


async def test_a_peer_that_says_nothing_is_waited_for_until_the_limit(
    pair: tuple[Running, Running], silent: str
) -> None:
    await check_computed(pair, 11, {"late"}, replica_id="s", address=silent, within_s=0.3)


async def test_a_peer_that_hangs_up_is_not_waited_for(
    pair: tuple[Running, Running], hanging_up: str
) -> None:
    await check_computed(pair, 12, {"lost"}, replica_id="h", address=hanging_up)


async def test_one_prompt_twice_at_once_is_pulled_once(pair: tuple[Running, Running]) -> None:
    peer, own = pair
    prompt = prompt_of(PROMPT, 20)
    computed = await filled(peer, prompt)
    answers = await asyncio.gather(
        *(answer(own, [*prompt, 7], pull_from(peer, PROMPT)) for _ in range(3))
    )
    assert sorted(pulled(chunks).tokens for chunks in answers) == [0, 0, PROMPT]
    assert {chunks[0].cached_tokens for chunks in answers} == {PROMPT}
    assert len({tuple(ids_of(chunks)) for chunks in answers}) == 1
    assert ids_of(await answer(own, prompt)) == ids_of(computed)


async def test_requests_of_one_prompt_wait_for_a_hanging_peer_once(
    pair: tuple[Running, Running], silent: str
) -> None:
    _, own = pair
    prompt = prompt_of(PROMPT, 21)
    pull = Pull("hangs", silent, PULL_KEY, PROMPT, 0.5)
    answers = await asyncio.gather(*(answer(own, prompt, pull) for _ in range(3)))
    reasons = sorted(pulled(chunks).reason for chunks in answers)
    assert reasons.count("late") == 1
    assert set(reasons) <= {"late", "lost", ""}  # empty: the first one's blocks were computed
    assert len({tuple(ids_of(chunks)) for chunks in answers}) == 1


async def test_both_engines_pull_from_each_other(pair: tuple[Running, Running]) -> None:
    first, second = pair
    prompts = prompt_of(PROMPT, 22), prompt_of(PROMPT, 23)
    computed = await filled(first, prompts[0]), await filled(second, prompts[1])
    answers = await asyncio.gather(
        answer(second, prompts[0], pull_from(first, PROMPT)),
        answer(first, prompts[1], pull_from(second, PROMPT)),
    )
    assert [pulled(chunks).tokens for chunks in answers] == [PROMPT - BLOCK] * 2
    assert list(map(ids_of, answers)) == list(map(ids_of, computed))


async def test_a_cleared_cache_stops_a_pull(pair: tuple[Running, Running], silent: str) -> None:
    _, own = pair
    prompt = prompt_of(PROMPT, 24)
    pull = Pull("cleared", silent, PULL_KEY, PROMPT, LONG_S)
    waiting = asyncio.create_task(answer(own, prompt, pull))
    await until(lambda: own.engine.load().waiting > 0)
    await own.engine.reset_prefix_cache()
    assert pulled(await waiting).reason == "off"
    assert ids_of(await answer(own, prompt)) == ids_of(await waiting)


async def test_an_aborted_request_leaves_the_engine_in_order(
    pair: tuple[Running, Running], silent: str
) -> None:
    peer, own = pair
    prompt = prompt_of(PROMPT, 25)
    await filled(peer, prompt)
    pull = Pull("aborted", silent, PULL_KEY, PROMPT, 1.0)
    waiting = asyncio.create_task(answer(own, prompt, pull))
    await until(lambda: own.engine.load().waiting > 0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    chunks = await answer(own, [*prompt, 7], pull_from(peer, PROMPT))
    assert chunks[0].cached_tokens in (0, PROMPT)


async def test_blocks_are_pulled_without_a_request(pair: tuple[Running, Running]) -> None:
    peer, own = pair
    prompt = prompt_of(PROMPT, 26)
    computed = await filled(peer, prompt)
    request = GenerateRequest(
        "warm", np.array(prompt, np.uint32), features=carried(pull_from(peer, PROMPT))
    )
    result = await own.exchanger.pull(request)
    assert (result.tokens, result.reason) == (PROMPT, "")
    await until(lambda: len(own.table.in_host) == PROMPT // BLOCK)
    assert len(own.table) == PROMPT // BLOCK  # nothing was computed
    assert (await own.exchanger.pull(request)).tokens == 0
    chunks = await answer(own, [*prompt, 7])
    assert chunks[0].cached_tokens == PROMPT
    assert ids_of(await answer(own, prompt)) == ids_of(computed)
    assert (await own.exchanger.pull(replace(request, features={}))).reason == "off"
