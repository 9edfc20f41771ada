"""Pulls of simulated engines.

An engine asks the peer's block server as vLLM does, but each row has a few bytes without a meaning.
So a peer that is gone, hangs or refuses behaves as in vLLM. The time of the copy is modelled.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from msgspec.structs import replace

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.generation import Chunk, Emit, GenerateRequest
from kvroute.contract.records import TierFacts
from kvroute.replica.fabric.block_format import format_of
from kvroute.replica.fabric.protocol import Key
from kvroute.replica.fabric.pull import Exchanging, LinkSpeed, Pull, PullResult, carried
from kvroute.replica.fabric.puller import PullEnd, PullRun, Target
from kvroute.replica.fabric.server import MAX_PULLS, BlockPlace, BlockServer
from kvroute.replica.sim_engine.blocks import BlockPool
from kvroute.settings.replica import ReplicaSettings
from kvroute.wire.tls import client_end, server_ends

ROW_BYTES = 8
SPEED = LinkSpeed(latency_s=0.005, bytes_per_s=1.25e9)  # modelled: a network of 10 Gbit/s


class PullingPool(BlockPool):
    """A KV cache into whose host memory blocks are copied from other engines."""

    def missing(self, request: GenerateRequest, tokens: int) -> list[Fingerprint]:
        """Return the blocks of a prompt's first `tokens` tokens that neither memory has."""
        table = self.table(request.token_ids, request.scope)
        hashes = self.reusable(table)[: tokens // self.block_size]
        return [hash_ for hash_ in hashes if hash_ not in self.cache and not self.is_in_host(hash_)]

    def is_in_host(self, hash_: Fingerprint) -> bool:
        """Return whether host memory has a block. Other threads may call this."""
        return self._host is not None and hash_ in self._host

    def arrive(self, hashes: Sequence[Fingerprint]) -> None:
        """Store blocks of a prompt in host memory that were copied from another engine."""
        if hashes:
            self._store_in_host(hashes)


class SimulatedPulls:
    """The pulls of one engine, and its block server."""

    def __init__(
        self,
        pool: PullingPool,
        tier: TierFacts,
        settings: ReplicaSettings,
        host: str,
        key: bytes,
        publish: Callable[[], None],
    ) -> None:
        """Start to serve blocks.

        Args:
            pool: The engine's KV cache.
            tier: Its host memory.
            settings: The replica's settings.
            host: The address on which to listen.
            key: Pulls must prove to know this key.
            publish: Publishes the events of the pool.

        Raises:
            OSError: No port is free.
        """
        model = [settings.served_model_name, settings.revision, settings.block_size]
        self._pool, self._publish, self._tls = pool, publish, settings.tls
        self._format = format_of({"simulated": model})
        self._block_s = tier.block_bytes / SPEED.bytes_per_s  # time to copy a block
        self._block_bytes = tier.block_bytes
        self._threads = ThreadPoolExecutor(MAX_PULLS, "pull")
        self._runs = set[PullRun]()
        self._tasks = set[asyncio.Task[PullResult]]()
        self._server = BlockServer(
            host,
            settings.ports,
            key=key,
            format_=self._format,
            find=self._place,
            rows=np.zeros((1, ROW_BYTES), np.uint8),
            tls=server_ends(self._tls, key),
        )
        self.exchanging = Exchanging(
            self._format, self._server.address, SPEED.latency_s, SPEED.bytes_per_s
        )

    def _place(self, key: Key) -> BlockPlace | None:
        """Return where a block is. Called in other threads."""
        return BlockPlace(self, 0) if self._pool.is_in_host(_hash(key)) else None

    async def pull(self, request: GenerateRequest, pull: Pull) -> PullResult:
        """Copy the blocks of a request's prompt. The copy goes on if this call is cancelled."""
        task = asyncio.create_task(self._pull(request, pull))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _pull(self, request: GenerateRequest, pull: Pull) -> PullResult:
        hashes = self._pool.missing(request, pull.tokens)
        if not hashes:
            return PullResult(tokens=0, size_bytes=0, took_s=0.0)
        began_s = time.monotonic()
        end = await self._run(hashes, pull, began_s + pull.within_s)
        in_time = max(0, int((pull.within_s - SPEED.latency_s) / self._block_s))
        copied, reason = len(end.arrived), end.reason
        if copied > in_time:
            copied, reason = in_time, "late"
        if copied:
            copy_s = SPEED.latency_s + copied * self._block_s
            await asyncio.sleep(began_s + copy_s - time.monotonic())
        self._pool.arrive(hashes[:copied])
        self._publish()
        return PullResult(
            tokens=copied * self._pool.block_size,
            size_bytes=copied * self._block_bytes,
            took_s=time.monotonic() - began_s,
            reason=reason,
        )

    async def _run(self, hashes: Sequence[Fingerprint], pull: Pull, deadline_s: float) -> PullEnd:
        targets = [Target(hash_.to_bytes(8, "big"), 0) for hash_ in hashes]
        run = PullRun(np.zeros((1, ROW_BYTES), np.uint8), [targets])
        self._runs.add(run)
        copy = partial(
            run.run,
            pull.address,
            key=pull.key,
            format_=self._format,
            deadline_s=deadline_s,
            tls=partial(client_end, self._tls, pull.tls, pull.key),
        )
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, copy)
        finally:
            self._runs.discard(run)

    def abort(self) -> None:
        """End all pulls soon. What they have copied stays."""
        for run in self._runs:
            run.abort()

    async def close(self) -> None:
        """End all pulls, and stop to serve."""
        self.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown()
        await asyncio.to_thread(self._server.close)


def reporting(emit: Emit, result: PullResult) -> Emit:
    """Return a function that emits chunks, and the result of the pull in the first one."""
    is_reported = False

    def report(chunk: Chunk) -> None:
        nonlocal is_reported
        if not is_reported:
            is_reported = True
            chunk = replace(chunk, features=carried(result))
        emit(chunk)

    return report


def _hash(key: Key) -> Fingerprint:
    return Fingerprint(int.from_bytes(key, "big"))
