"""Pulls between simulated engines, as routers see them."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from kvroute.contract.generation import Chunk, GenerateRequest
from kvroute.replica.engine.kv_events import BlockStored
from kvroute.replica.engines import start_engines
from kvroute.replica.fabric.pull import Pull, PullResult, carried
from kvroute.replica.sim_engine.blocks import HOST
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from kvroute.settings.replica import ReplicaSettings
from tests.support.chunks import collected
from tests.support.engines import PULL_KEY, PULLING, SECRET, pull_results

SIZE = 32  # tokens in a block
BLOCKS = 10
PROMPT = BLOCKS * SIZE + 1  # tokens
LONG_S = 60.0


async def started(**own: Any) -> SimulatedEngine:
    settings = ReplicaSettings(
        served_model_name="m",
        redis_url="",
        engine="simulated",
        block_size=SIZE,
        simulated_prefill_tokens_per_s=1000,
        simulated_decode_ms=0,
        **{"host_cache_gb": "1", "replica_features": PULLING, **own},
    )
    (engine,) = await start_engines(settings, secret=SECRET)
    assert isinstance(engine, SimulatedEngine)
    return engine


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[tuple[SimulatedEngine, SimulatedEngine]]:
    peer, own = await started(), await started()
    yield peer, own
    await peer.close()
    await own.close()


def request(seed: int = 1, pull: Pull | None = None, namespace: str = "") -> GenerateRequest:
    ids = np.random.default_rng(seed).integers(0, 1000, PROMPT).astype(np.uint32)
    return GenerateRequest(f"r{seed}", ids, namespace, max_tokens=4, features=carried(pull))


def pull_from(peer: SimulatedEngine, tokens: int = PROMPT, **fields: Any) -> Pull:
    own: dict[str, Any] = {
        "address": peer.exchanging().address,
        "key": PULL_KEY,
        "within_s": LONG_S,
    } | fields
    return Pull("peer", tokens=tokens, **own)


async def run(engine: SimulatedEngine, request: GenerateRequest) -> tuple[list[Chunk], PullResult]:
    chunks = await collected(engine.generate, request)
    (result,) = pull_results(chunks)
    return chunks, result


Pair = tuple[SimulatedEngine, SimulatedEngine]


async def test_pulled_blocks_are_hits_in_host_memory(pair: Pair) -> None:
    peer, own = pair
    computed = await collected(peer.generate, request())
    chunks, result = await run(own, request(pull=pull_from(peer)))
    assert (result.tokens, result.reason) == (BLOCKS * SIZE, "")
    assert result.size_bytes == BLOCKS * own.facts.host.block_bytes  # type: ignore[union-attr]
    assert result.took_s > 0
    assert chunks[0].cached_tokens == BLOCKS * SIZE
    assert [chunk.token_ids for chunk in chunks] == [chunk.token_ids for chunk in computed]
    events = await anext(own.events())
    stored = [event for event in events if isinstance(event, BlockStored) and event.group == HOST]
    assert len(stored[0].block_hashes) == BLOCKS
    assert own.exchanging().bytes_per_s > 0


async def test_only_missing_blocks_that_the_pull_names_are_copied(pair: Pair) -> None:
    peer, own = pair
    await collected(peer.generate, request())
    _, first = await run(own, request(pull=pull_from(peer, 4 * SIZE)))
    assert first.tokens == 4 * SIZE
    _, again = await run(own, request(pull=pull_from(peer)))
    assert again.tokens == 0  # it has computed them


async def test_blocks_are_pulled_without_a_request(pair: Pair) -> None:
    peer, own = pair
    await collected(peer.generate, request())
    result = await own.pull(request(pull=pull_from(peer)))
    assert (result.tokens, result.reason) == (BLOCKS * SIZE, "")
    chunks = await collected(own.generate, request())
    assert chunks[0].cached_tokens == BLOCKS * SIZE
    assert (await own.pull(request())).reason == "off"


async def test_tenants_do_not_get_each_others_blocks(pair: Pair) -> None:
    peer, own = pair
    await collected(peer.generate, request())
    _, result = await run(own, request(pull=pull_from(peer), namespace="tenant"))
    assert (result.tokens, result.reason) == (0, "gone")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"address": "127.0.0.1:1"}, "lost"),
        ({"key": b"other"}, "refused"),
        ({"within_s": 0.0}, "late"),
    ],
)
async def test_a_pull_that_fails_is_computed(pair: Pair, fields: Any, reason: str) -> None:
    peer, own = pair
    computed = await collected(peer.generate, request())
    chunks, result = await run(own, request(pull=pull_from(peer, **fields)))
    assert (result.tokens, result.reason) == (0, reason)
    assert chunks[0].cached_tokens == 0
    assert [chunk.token_ids for chunk in chunks] == [chunk.token_ids for chunk in computed]


async def test_the_modelled_time_of_a_copy_is_limited(pair: Pair) -> None:
    peer, own = pair
    await collected(peer.generate, request())
    block_s = own.facts.host.block_bytes / own.exchanging().bytes_per_s  # type: ignore[union-attr]
    within_s = own.exchanging().latency_s + 5.5 * block_s
    result = await own.pull(request(pull=pull_from(peer, within_s=within_s)))
    assert result.tokens <= 5 * SIZE
    assert result.reason == "late"


async def test_other_requests_run_while_one_waits_for_its_pull(pair: Pair) -> None:
    _, own = pair
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        pull = pull_from(own, address=address)
        waiting = asyncio.create_task(run(own, request(pull=pull)))
        await collected(own.generate, request(seed=2))
        assert not waiting.done()
        assert await own.reset_prefix_cache()  # it ends pulls
        _, result = await waiting
    assert (result.tokens, result.reason) == (0, "off")


@pytest.mark.parametrize("own", [{"replica_features": {}}, {"host_cache_gb": "0"}])
async def test_an_engine_without_pulls_computes_and_reports_nothing(own: dict[str, Any]) -> None:
    engine = await started(**own)
    assert (engine.exchanging().address, engine.exchanging().bytes_per_s) == ("", 0.0)
    pull = Pull("peer", "127.0.0.1:1", PULL_KEY, PROMPT, LONG_S)
    chunks = await collected(engine.generate, request(pull=pull))
    assert {chunk.features for chunk in chunks} == {None}
    assert (await engine.pull(request(pull=pull))).reason == "off"
    await engine.close()
