"""The speed at which a router's mirror follows the index in Redis, and the mirror's memory.

The mirror is the copy of the index in a router's memory.
"""

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import numpy as np
import psutil

from kvroute.blocks.fingerprint import unpack
from kvroute.contract.records import Description, Load
from kvroute.local.embedded_redis import embedded_redis
from kvroute.router.index.feed import Feed
from kvroute.router.index.mirror import Mirror
from kvroute.router.placement.fleet import Fleet
from kvroute.store.connection import connect
from kvroute.store.index import BATCH_BLOCKS, Index
from tests.bench.apart import apart
from tests.bench.indexed import BLOCKS, FACTS, REPLICAS
from tests.bench.report import Row, Section

CHAIN = 100  # number of consecutive blocks that the same replicas hold
LEASE_S = 600.0
LOAD = Load()
DESCRIPTION = Description(FACTS)


class Batch(NamedTuple):
    """A change of one replica's blocks, as in the index's stream in Redis."""

    replica_id: str
    packed: bytes


def memory() -> Section:
    cases = (
        "each on one replica",
        "each on eight, by chains",
        "each on eight, at random",
        "each on one replica, and all replaced once",
    )
    return Section(
        f"Memory of {BLOCKS:,} blocks on 64 replicas", [apart(_memory, c) for c in cases]
    )


def rate() -> Section:
    rows = [apart(_decode_and_apply), *(apart(_follow, size) for size in (BATCH_BLOCKS, 500, 50))]
    return Section("From the stream to the mirror, millions of blocks a second", rows)


def batches(seed: int, size: int = BATCH_BLOCKS) -> Iterator[Batch]:
    """Yield changes with BLOCKS different blocks, for one replica after the other."""
    rng = np.random.default_rng(seed)
    for i in range(BLOCKS // size):
        packed = rng.integers(0, 2**64, size, dtype=np.uint64).tobytes()
        yield Batch(REPLICAS[i % len(REPLICAS)], packed)


def _memory(case: str) -> Row:
    mirror = _mirror()
    before = psutil.Process().memory_info().rss
    _fill(mirror, case)
    grown = psutil.Process().memory_info().rss - before
    return {
        "blocks": case,
        "bytes a block (growth of RSS)": round(grown / len(mirror)),
        "bytes a block (sum of objects)": round(_object_bytes(mirror) / len(mirror)),
    }


def _fill(mirror: Mirror, case: str) -> None:
    chosen = random.Random(0)
    match case:
        case "each on one replica":
            for replica_id, packed in batches(0):
                mirror.add(replica_id, unpack(packed))
        case "each on eight, by chains":
            for _, packed in batches(0, CHAIN):
                for replica_id in chosen.sample(REPLICAS, 8):
                    mirror.add(replica_id, unpack(packed))
        case "each on eight, at random":  # not realistic: each block has another set of replicas
            for _, packed in batches(0, 1):
                for replica_id in chosen.sample(REPLICAS, 8):
                    mirror.add(replica_id, unpack(packed))
        case "each on one replica, and all replaced once":
            for replica_id, packed in batches(0):
                mirror.add(replica_id, unpack(packed))
            for (replica_id, old), (_, new) in zip(batches(0), batches(1), strict=True):
                mirror.remove(replica_id, unpack(old))
                mirror.add(replica_id, unpack(new))


def _object_bytes(mirror: Mirror) -> int:
    """Return the size of the tables, the fingerprints and the different masks.

    A mask is a set of replicas that hold a block. The memory that the allocator adds is not
    included.
    """
    tables = mirror._held._tables
    masks = {id(mask): mask for table in tables for mask in table.values()}
    fingerprints = sum(sys.getsizeof(key) for table in tables for key in table)
    return fingerprints + sum(map(sys.getsizeof, tables)) + sum(map(sys.getsizeof, masks.values()))


def _mirror() -> Mirror:
    mirror = Mirror()
    for replica_id in REPLICAS:
        mirror.join(replica_id)
    return mirror


def _decode_and_apply() -> Row:
    """Measure alternating removals and additions in a full mirror, without Redis."""
    mirror, first, second = _mirror(), list(batches(0)), list(batches(1))
    for replica_id, packed in first:
        mirror.add(replica_id, unpack(packed))
    begun, begun_cpu = time.perf_counter(), time.process_time()
    for (replica_id, old), (_, new) in zip(first, second, strict=True):
        mirror.remove(replica_id, unpack(old))
        mirror.add(replica_id, unpack(new))
    seconds, cpu_s = time.perf_counter() - begun, time.process_time() - begun_cpu
    part = "decode and apply alone, half of them removals"
    return _row(part, 2 * BLOCKS / seconds, cpu_s / 2, None)


def _follow(size: int) -> Row:
    """Measure how a router reads the changes that were written while it did not read."""
    with embedded_redis() as url:
        return asyncio.run(_follow_on(url, size))


async def _follow_on(url: str, size: int) -> Row:
    client = connect(url)
    index = Index(client, "m")
    writers = {
        replica_id: await index.register(
            replica_id, "1", description=DESCRIPTION, load=LOAD, lease_s=LEASE_S
        )
        for replica_id in REPLICAS
    }
    fleet = Fleet(model="m", revision="", block_size=16, rng=random.Random(0))
    feed = Feed(index, fleet)
    async with _running(feed.run()):
        while len(fleet.mirror.replica_ids) < len(REPLICAS):
            await asyncio.sleep(0.01)
    for replica_id, packed in batches(0, size):
        writers[replica_id] = await index.change(
            writers[replica_id], added=unpack(packed), lease_s=LEASE_S
        )
    longest = LongestPause()
    begun, begun_cpu = time.perf_counter(), time.process_time()
    async with _running(longest.watch()), _running(feed._follow()):
        while len(fleet.mirror) < BLOCKS:
            await asyncio.sleep(0.002)
        seconds, cpu_s = time.perf_counter() - begun, time.process_time() - begun_cpu
    await client.aclose()
    return _row(f"Redis to mirror, changes of {size:,}", BLOCKS / seconds, cpu_s, longest.pause_s)


def _row(part: str, blocks_per_s: float, cpu_s: float, pause_s: float | None) -> Row:
    return {
        "part": part,
        "M blocks/s": blocks_per_s / 1e6,
        "router's CPU s for a million": cpu_s,
        "longest wait of a request, ms": None if pause_s is None else 1000 * pause_s,
    }


@asynccontextmanager
async def _running(coroutine: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run a coroutine until the context ends."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(coroutine)
        yield
        task.cancel()


class LongestPause:
    """Measures the longest time for which the event loop was blocked."""

    pause_s = 0.0

    async def watch(self) -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.001)
            self.pause_s = max(self.pause_s, time.perf_counter() - begun - 0.001)
