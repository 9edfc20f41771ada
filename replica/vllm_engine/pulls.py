"""Pulls of one rank, in the replica's process: their results and their speed."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import msgspec

from kvroute.contract.generation import Chunk, Emit, GenerateRequest
from kvroute.replica.fabric.pull import (
    OFF,
    Exchanging,
    LinkSpeed,
    Pull,
    PullResult,
    carried,
    carried_in,
    pull_key,
)
from kvroute.replica.fabric.pull_speed import PullSpeed
from kvroute.replica.fabric.weights import Weights
from kvroute.replica.vllm_engine.blocks.events import Pulled
from kvroute.replica.vllm_engine.core.rank_core import RankCore
from kvroute.replica.vllm_engine.host.args import slower_tiers
from kvroute.replica.vllm_engine.host.tier import OpenTiers
from kvroute.replica.vllm_engine.process.quick_end import STOP_S
from kvroute.settings.replica import ReplicaSettings

log = logging.getLogger("kvroute.replica")

Run = Callable[[GenerateRequest, Emit], Awaitable[None]]


def weights_of(settings: ReplicaSettings, model: str) -> Weights | None:
    """Return the weights that an engine is about to read; None: no tier depends on them."""
    if not slower_tiers(settings):
        return None
    cache = settings.engine_args.get("download_dir")
    return Weights(
        model,
        settings.revision,
        adapters=settings.adapters,
        cache=cache if isinstance(cache, str) else None,
        are_random=settings.engine_args.get("load_format") == "dummy",
    )


class EnginePulls:
    """The pulls of one rank's requests."""

    def __init__(self, opened: OpenTiers, stop_s: float | None = None) -> None:
        """Create the pulls of a rank.

        Args:
            opened: The tiers behind the rank's host memory.
            stop_s: Time that vLLM's processes get to end, in seconds; None: vLLM's own default.
        """
        self.opened, self.stop_s = opened, stop_s
        self._speed = PullSpeed(LinkSpeed(opened.latency_s, opened.bytes_per_s))
        self._weights: Weights | None = None
        self._opening: asyncio.Task[None] | None = None  # waits until the weights are known
        # Id of a running request with a pull -> its result, as soon as it is known.
        self._results: dict[str, asyncio.Future[PullResult]] = {}

    @classmethod
    async def start(
        cls,
        core: RankCore,
        settings: ReplicaSettings,
        host: str,
        secret: bytes,
        weights: Weights | None,
    ) -> "EnginePulls":
        """Open the tiers behind a rank's host memory, if it has any; see VllmEngine.start.

        They stay closed until the engine's weights are known.
        """
        if weights is None:
            return cls(OpenTiers())
        if weights.digest == "":
            return cls(OpenTiers(), stop_s=STOP_S)
        key, tls = pull_key(secret) if secret else b"", [*settings.tls]

        async def opened(digest: str) -> OpenTiers:
            args = (host, [*settings.ports], key, digest, tls)
            return OpenTiers(**await core.call("kvroute_open_tiers", *args))

        pulls = cls(await opened(weights.digest or ""), stop_s=STOP_S)
        pulls._weights = weights
        if weights.digest is None:
            pulls._opening = asyncio.create_task(pulls._open_later(weights, opened))
        return pulls

    async def _open_later(
        self, weights: Weights, opened: Callable[[str], Awaitable[OpenTiers]]
    ) -> None:
        digest = await weights.known()
        if not digest:
            return
        try:
            self.opened = await opened(digest)
        except Exception:
            log.exception("the tiers behind host memory cannot be opened")
            return
        self._speed = PullSpeed(LinkSpeed(self.opened.latency_s, self.opened.bytes_per_s))

    def close(self) -> None:
        """Stop to find out the weights."""
        if self._weights:
            self._weights.stop()
        if self._opening:
            self._opening.cancel()

    @property
    def exchanging(self) -> Exchanging:
        """Return how the rank exchanges blocks, with the speed of its next pull."""
        speed = self._speed.current()
        return Exchanging(self.opened.format, self.opened.address, *speed)

    def record(self, events: Iterable[msgspec.Struct]) -> None:
        """Record the results of pulls among the events of vLLM's process."""
        if not self.opened.address:
            return
        for event in events:
            if isinstance(event, Pulled):
                if not event.result.reason:
                    self._speed.record(event.result.size_bytes, event.result.took_s)
                result = self._results.get(event.request_id)
                if result is not None and not result.done():
                    result.set_result(event.result)

    @contextlib.contextmanager
    def reported(self, request: GenerateRequest, emit: Emit) -> Iterator[Emit]:
        """Return a function that emits the request's chunks, and the result of its pull in one."""
        if carried_in(request.features, Pull) is None:
            yield emit
            return
        result: asyncio.Future[PullResult] = asyncio.get_running_loop().create_future()
        is_reported = not self.opened.address

        def report(chunk: Chunk) -> None:
            nonlocal is_reported
            if not is_reported and result.done():
                is_reported = True
                chunk = msgspec.structs.replace(chunk, features=carried(result.result()))
            emit(chunk)

        self._results[request.request_id] = result
        try:
            yield report
        finally:
            self._results.pop(request.request_id, None)

    async def only(self, request: GenerateRequest, run: Run) -> PullResult:
        """Pull a prompt's blocks with a request that is never computed.

        Args:
            request: The prompt and its pull.
            run: Runs a request that only pulls, until it is cancelled.
        """
        if carried_in(request.features, Pull) is None or not self.opened.address:
            return OFF
        result: asyncio.Future[PullResult] = asyncio.get_running_loop().create_future()
        self._results[request.request_id] = result
        task = asyncio.ensure_future(run(request.using_all_blocks(), lambda _: None))
        ends: list[asyncio.Future[Any]] = [task, result]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                await task  # it has failed
            return result.result() if result.done() else OFF
        finally:
            self._results.pop(request.request_id, None)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
