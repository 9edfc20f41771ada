"""How fast a new router loads a large index: its hits as a share of an old router's hits."""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence

import numpy as np
import psutil

from kvroute.blocks.fingerprint import Fingerprint, unpack
from kvroute.local.embedded_redis import embedded_redis
from kvroute.router.index.feed import Feed
from kvroute.router.placement.fleet import Fleet
from kvroute.store.connection import connect
from kvroute.store.index import BATCH_BLOCKS, Index
from tests.bench.events import DESCRIPTION, LEASE_S, LOAD, LongestPause, _running
from tests.bench.indexed import BLOCK
from tests.bench.report import Row, Section

REPLICAS = [f"r{i}" for i in range(100)]
BLOCKS_EACH = 50_000
CHAIN = 100  # number of blocks of a prompt
SHARED = 0.3  # share of a replica's blocks that other replicas also have
HOLDERS = 5  # number of replicas that have a shared chain
PROMPTS = 200  # number of prompts; few enough to look them up quickly
LOOKS_S = (0.5, 1.0, 2.0, 3.0)  # seconds since the start at which hits are measured

Chain = tuple[Fingerprint, ...]


def successor() -> Section:
    with embedded_redis() as url:
        rows = asyncio.run(_successor(url))
    blocks = len(REPLICAS) * BLOCKS_EACH
    return Section(f"A new router, {blocks:,} blocks on {len(REPLICAS)} replicas", rows)


async def _successor(url: str) -> list[Row]:
    client = connect(url)
    index = Index(client, "m")
    prompts = list[Chain]()
    for replica_id, chains in _caches():
        await _announce(index, replica_id, chains)
        prompts += chains[:: len(REPLICAS) * BLOCKS_EACH // CHAIN // PROMPTS]
    row = await _load(index, prompts)
    await client.aclose()
    return [row]


async def _load(index: Index, prompts: Sequence[Chain]) -> Row:
    process, longest = psutil.Process(), LongestPause()
    rss = process.memory_info().rss
    fleet = Fleet(model="m", revision="", block_size=BLOCK, rng=random.Random(0))
    feed = Feed(index, fleet)
    shares = {}
    begun, begun_cpu = time.perf_counter(), time.process_time()
    async with _running(longest.watch()), _running(feed.run()):
        for look_s in LOOKS_S:
            await asyncio.sleep(begun + look_s - time.perf_counter())
            shares[f"hits after {look_s} s"] = _hit_share(fleet, prompts)
        await feed.wait_until_loaded(timeout_s=LEASE_S)
        seconds, cpu_s = time.perf_counter() - begun, time.process_time() - begun_cpu
    return {
        "blocks, each counted once": len(fleet.mirror),
        **shares,
        "loaded after s": seconds,
        "CPU s": cpu_s,
        "longest wait of a request, ms": 1000 * longest.pause_s,
        "MB": (process.memory_info().rss - rss) / 1e6,
    }


def _hit_share(fleet: Fleet, prompts: Sequence[Chain]) -> float:
    """Return the hits as a share of those of a router that has loaded everything."""
    hits = [max(fleet.mirror.hits(chain).values(), default=0) for chain in prompts]
    return sum(hits) / sum(map(len, prompts))


def _caches() -> Iterator[tuple[str, list[Chain]]]:
    """Yield each replica and its chains: chains of its own, and chains of HOLDERS replicas."""
    rng, chosen = np.random.default_rng(0), random.Random(0)
    shared_each = round(SHARED * BLOCKS_EACH / CHAIN)
    shared = _chains(rng, shared_each * len(REPLICAS) // HOLDERS)
    for replica_id in REPLICAS:
        own = _chains(rng, BLOCKS_EACH // CHAIN - shared_each)
        yield replica_id, own + chosen.sample(shared, shared_each)


def _chains(rng: np.random.Generator, count: int) -> list[Chain]:
    return [unpack(rng.integers(0, 2**64, CHAIN, dtype=np.uint64).tobytes()) for _ in range(count)]


async def _announce(index: Index, replica_id: str, chains: Sequence[Chain]) -> None:
    writer_state = await index.register(
        replica_id, "1", description=DESCRIPTION, load=LOAD, lease_s=LEASE_S
    )
    blocks = [fingerprint for chain in chains for fingerprint in chain]
    for begin in range(0, len(blocks), BATCH_BLOCKS):
        added = blocks[begin : begin + BATCH_BLOCKS]
        writer_state = await index.change(writer_state, added=added, lease_s=LEASE_S)
