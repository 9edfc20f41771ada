"""The time that HAProxy and the router add to a request.

A simulated engine without delays answers prompts of equal length that come in two ways: directly,
through a connection like that of a router, and through the HTTP endpoint. All processes share the
machine's cores.
"""

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import numpy as np

from kvroute.contract.generation import Chunk, GenerateRequest
from kvroute.local.embedded_redis import embedded_redis
from kvroute.local.ports import free_port
from kvroute.local.progress import StartProgress
from kvroute.local.ray_cluster import LostProcesses, deploy, local_ray
from kvroute.local.signals import StopSignals
from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.router.connections.serve_source import ServeSource
from kvroute.settings.serve import ServeSettings
from kvroute.wire.link import Stream, connect
from tests.bench.report import Row, Section
from tests.support.answers import completion
from tests.support.waiting import until

PROMPT_TOKENS = 500
ANSWER_TOKENS = 16
REQUESTS = 400
Ask = Callable[[list[int]], Awaitable[float]]  # sends a prompt; returns seconds to first token


def path() -> Section:
    with (
        # The progress of the start must not be in the report.
        contextlib.redirect_stdout(sys.stderr),
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        embedded_redis() as redis_url,
    ):
        settings = ServeSettings(
            engine="simulated",
            replicas=1,
            port=free_port(),
            redis_url=redis_url,
            simulated_prefill_tokens_per_s=0,
            simulated_decode_ms=0,
        )
        lost = LostProcesses(Path(folder), StartProgress())
        with local_ray(settings, Path(folder), lost):
            from kvroute.app import build

            application = build(settings.model_dump(mode="json"))
            deploy(application, StartProgress(), StopSignals(), time.monotonic() + 120, lost)
            loop = asyncio.new_event_loop()  # Serve's handle needs it until Serve is shut down
            url = f"http://127.0.0.1:{settings.port}/v1/completions"
            rows = loop.run_until_complete(compare(url))
            return Section("Path of a request, one simulated engine without delays", rows)


async def compare(url: str) -> list[Row]:
    from ray import serve

    source = ServeSource([serve.get_deployment_handle("Replica", "kvroute")])
    await until(source.ids)
    (replica_id,) = source.ids()
    address = await source.address(replica_id)
    link = await connect("replica", address.host, address.port, address.secret, within_s=10)

    async def direct(prompt: list[int]) -> float:
        ids, call = np.array(prompt, np.uint32), completion(max_tokens=ANSWER_TOKENS)
        request = GenerateRequest(uuid.uuid4().hex, ids, call=call)
        return await first_of(_chunks(link.open(request, max_waiting=10_000)))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def routed(prompt: list[int]) -> float:
            body = {
                "model": BUILTIN_MODEL,
                "prompt": prompt,
                "max_tokens": ANSWER_TOKENS,
                "stream": True,
            }
            begun = time.perf_counter()
            async with session.post(url, json=body) as response:
                assert response.status == 200, await response.text()
                return await first_of(response.content, begun)

        return [
            {"path": name, "concurrent": concurrent, **await measure(ask, concurrent)}
            for concurrent in (1, 16)
            for name, ask in (("replica", direct), ("HAProxy + router + replica", routed))
        ]


async def _chunks(stream: Stream) -> AsyncIterator[Chunk]:
    while (chunk := await stream.next()) is not None:
        yield chunk


async def first_of(stream: object, begun: float | None = None) -> float:
    """Read a stream to its end; return the seconds until its first item."""
    begun = begun or time.perf_counter()
    first = None
    async for _ in stream:  # type: ignore[attr-defined]
        first = first or time.perf_counter() - begun
    assert first is not None
    return first


async def measure(ask: Ask, concurrent: int) -> Row:
    rng = np.random.default_rng(concurrent)
    prompts = [rng.integers(1000, 40_000, PROMPT_TOKENS).tolist() for _ in range(REQUESTS)]
    remaining, times = iter(prompts), list[float]()

    async def worker() -> None:
        for prompt in remaining:
            times.append(await ask(prompt))

    await ask(prompts[0])
    begun = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrent)))
    rate = REQUESTS / (time.perf_counter() - begun)
    p50, p99 = statistics.median(times), statistics.quantiles(times, n=100)[-1]
    return {"requests/s": rate, "TTFT p50 ms": 1000 * p50, "TTFT p99 ms": 1000 * p99}
