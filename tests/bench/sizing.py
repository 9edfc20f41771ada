"""The costs that grow with a fleet: the numbers in docs/sizing.md."""

import asyncio
import itertools
import random
from collections.abc import Sequence

import aiohttp
import numpy as np
import psutil
import redis.asyncio as redis

from kvroute.blocks.fingerprint import Fingerprint, unpack
from kvroute.local.embedded_redis import embedded_redis
from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.router.connections.peers import PeerPublisher, PeerSubscriber
from kvroute.router.placement.fleet import Fleet
from kvroute.store.connection import connect
from kvroute.store.index import BATCH_BLOCKS, Index
from kvroute.store.index_values import WriterState
from tests.bench.apart import apart
from tests.bench.decision import median_ms
from tests.bench.events import DESCRIPTION, LEASE_S, LOAD
from tests.bench.indexed import BLOCK, Tokens
from tests.bench.report import Row, Section, each_s
from tests.support.serving import Cluster, start_cluster

FLEETS = (10, 100, 1000)  # numbers of replicas
BLOCKS = 2_000_000  # number of different blocks in the fleet
CHAIN = 500  # number of consecutive blocks that the same replicas hold
HOLDERS = 2  # number of replicas that hold each block
CHANGE_BLOCKS = (50, 500)  # numbers of blocks in a change; half are stored, half are evicted
CHANGES = 400
ROUNDS = 31
PROMPT_TOKENS = 16_384
HEARD = 200  # number of another router's requests, about which the router gets messages

REQUESTS = 400
LONG_ANSWERS = 40
LONG_TOKENS = 500
STREAM_INTERVALS = (1, 4, 16)  # numbers of tokens in a chunk


def growth() -> Section:
    rows = [apart(_growth, replicas) for replicas in FLEETS]
    return Section(f"A fleet of {BLOCKS:,} blocks, each on {HOLDERS} replicas", rows)


def streaming() -> Section:
    """Measure the CPU time of a router for a request and for a token, on a real cluster."""
    return Section(
        "CPU time of a router's process, 20 streams at once",
        [_streaming(interval) for interval in STREAM_INTERVALS],
    )


def _streaming(interval: int) -> Row:
    with start_cluster(
        *("--engine", "simulated", "--replicas", "1", "--simulated-prefill-tokens-per-s", "0"),
        *("--simulated-decode-ms", "20", "--stream-interval", str(interval)),
    ) as cluster:
        short_s = asyncio.run(_router_cpu_s(cluster, REQUESTS, tokens=1, at_once=4))
        long_s = asyncio.run(_router_cpu_s(cluster, LONG_ANSWERS, LONG_TOKENS, at_once=20))
    request_s = short_s / REQUESTS
    token_s = (long_s - LONG_ANSWERS * request_s) / (LONG_ANSWERS * LONG_TOKENS)
    return {
        "--stream-interval": interval,
        "ms a request of 500 tokens": 1000 * request_s,
        "us a token of the answer": 1e6 * token_s,
    }


def _growth(replicas: int) -> Row:
    with embedded_redis() as url:
        return asyncio.run(_measure(url, [f"r{i}" for i in range(replicas)]))


async def _measure(url: str, replica_ids: Sequence[str]) -> Row:
    client = connect(url)
    server = redis.from_url(url)
    index, rng = Index(client, "m"), np.random.default_rng(0)
    empty = await _memory(server)
    writer_states = await _announce(index, replica_ids, rng)
    filled = await _memory(server)
    row: Row = {"replicas": len(replica_ids)}
    row["Redis, bytes a block and holder"] = (filled - empty) / (HOLDERS * BLOCKS)
    for blocks in CHANGE_BLOCKS:
        us = await _change_us(server, index, writer_states[0], rng, blocks)
        row[f"Redis, us a block in changes of {blocks}"] = us
        writer_states[0] = await _register(index, replica_ids[0])
    row["Redis, us a renewal"] = await _renewal_us(server, index, writer_states[-1])
    row |= await _router(index, server, replica_ids, rng)
    await client.aclose()
    await server.aclose()
    return row


async def _announce(
    index: Index, replica_ids: Sequence[str], rng: np.random.Generator
) -> list[WriterState]:
    """Write the blocks of all replicas to the index. HOLDERS replicas have each chain."""
    held: dict[str, list[Fingerprint]] = {replica_id: [] for replica_id in replica_ids}
    ring = itertools.cycle(range(len(replica_ids)))
    for _ in range(BLOCKS // CHAIN):
        first, chain = next(ring), _chain(rng, CHAIN)
        for i in range(HOLDERS):
            held[replica_ids[(first + i) % len(replica_ids)]] += chain
    writer_states = []
    for replica_id, blocks in held.items():
        writer_state = await _register(index, replica_id)
        for begin in range(0, len(blocks), BATCH_BLOCKS):
            added = blocks[begin : begin + BATCH_BLOCKS]
            writer_state = await index.change(writer_state, added=added, lease_s=LEASE_S)
        writer_states.append(writer_state)
    return writer_states


async def _register(index: Index, replica_id: str) -> WriterState:
    return await index.register(
        replica_id, "1", description=DESCRIPTION, load=LOAD, lease_s=LEASE_S
    )


def _chain(rng: np.random.Generator, blocks: int) -> tuple[Fingerprint, ...]:
    return unpack(rng.integers(0, 2**64, blocks, dtype=np.uint64).tobytes())


async def _memory(server: "redis.Redis") -> int:
    """Return the memory of Redis in bytes, without the stream, whose size is limited."""
    streams = [key async for key in server.scan_iter(_type="stream")]
    stream_bytes = [await server.memory_usage(key, samples=0) or 0 for key in streams]
    return int((await server.info("memory"))["used_memory"]) - sum(stream_bytes)


async def _cpu_s(server: "redis.Redis") -> float:
    info = await server.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


async def _change_us(
    server: "redis.Redis",
    index: Index,
    writer_state: WriterState,
    rng: np.random.Generator,
    blocks: int,
) -> float:
    """Return the CPU time of Redis per block of a change, in microseconds."""
    old = _chain(rng, blocks // 2)
    writer_state = await index.change(writer_state, added=old, lease_s=LEASE_S)
    begun_s = await _cpu_s(server)
    for _ in range(CHANGES):
        new = _chain(rng, blocks // 2)
        writer_state = await index.change(writer_state, added=new, removed=old, lease_s=LEASE_S)
        old = new
    return 1e6 * (await _cpu_s(server) - begun_s) / (CHANGES * blocks)


async def _renewal_us(server: "redis.Redis", index: Index, writer_state: WriterState) -> float:
    begun_s = await _cpu_s(server)
    for _ in range(CHANGES):
        await index.renew(writer_state, load=LOAD, lease_s=LEASE_S)
    return 1e6 * (await _cpu_s(server) - begun_s) / CHANGES


async def _router(
    index: Index, server: "redis.Redis", replica_ids: Sequence[str], rng: np.random.Generator
) -> Row:
    """Measure a router that has read the whole index."""
    fleet = Fleet(model="m", revision="", block_size=BLOCK, rng=random.Random(0))
    process = psutil.Process()
    before = process.memory_info().rss
    for record in (records := await index.records()):
        packed = (await index.blocks(record)).packed
        for _ in fleet.mirror.load(record.id, packed):
            pass
    grown = process.memory_info().rss - before
    fleet.update(records)
    tokens = rng.integers(0, 40_000, PROMPT_TOKENS, dtype=np.uint32)
    fleet.mirror.add(replica_ids[0], fleet.caches.chain(tokens[: PROMPT_TOKENS // 2]))
    placed_ms = median_ms(each_s(lambda: fleet.place(tokens, replica_ids, 0.0), ROUNDS))
    router_s, redis_s = await _poll_s(index, server, fleet)
    return {
        "router, bytes a block": grown / len(fleet.mirror),
        "router, ms a decision": placed_ms,
        "router, ms a poll": 1000 * router_s,
        "Redis, ms a poll": 1000 * redis_s,
        "router, us a request of another router": _heard_us(fleet, tokens),
    }


async def _poll_s(index: Index, server: "redis.Redis", fleet: Fleet) -> tuple[float, float]:
    """Return the CPU seconds of router and Redis to read all records, as done each second."""
    process = psutil.Process()
    router_s, redis_s = sum(process.cpu_times()[:2]), await _cpu_s(server)
    for _ in range(ROUNDS):
        fleet.update(await index.records())
    router_s, redis_s = sum(process.cpu_times()[:2]) - router_s, await _cpu_s(server) - redis_s
    return router_s / ROUNDS, redis_s / ROUNDS


def _heard_us(fleet: Fleet, tokens: Tokens) -> float:
    """Return the CPU time to process the messages about another router's request, in us."""
    sender, rng = PeerPublisher(), random.Random(0)
    other = Fleet(model="m", revision="", block_size=BLOCK, rng=rng, observer=sender)
    other.update(fleet.replicas.records)
    replica_ids = [record.id for record in fleet.replicas.records]
    for i in range(HEARD):
        placement = other.place(tokens + i, replica_ids, 0.0)
        attempt = other.sent(placement, replica_ids[i % len(replica_ids)], str(i), 0.0)
        attempt.first_token(0.0)
        attempt.end()
    message, receiver = sender.next_message(), PeerSubscriber(fleet, own="", clock=lambda: 0.0)
    return 1e6 * each_s(lambda: receiver.receive(message), 1)[0] / HEARD


async def _router_cpu_s(cluster: Cluster, requests: int, tokens: int, at_once: int) -> float:
    router = _router_process(cluster)
    rng, parallel = np.random.default_rng(tokens), asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask() -> None:
            prompt = rng.integers(1000, 40_000, 500).tolist()
            body = {"model": BUILTIN_MODEL, "prompt": prompt, "max_tokens": tokens}
            body |= {"stream": True, "ignore_eos": True}
            async with parallel, session.post(f"{cluster.url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for _ in answer.content:
                    pass

        await ask()
        begun = sum(router.cpu_times()[:2])
        await asyncio.gather(*(ask() for _ in range(requests)))
        return sum(router.cpu_times()[:2]) - begun


def _router_process(cluster: Cluster) -> psutil.Process:
    (router,) = cluster.routers()
    return router
