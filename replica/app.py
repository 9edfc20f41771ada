"""One engine behind Ray Serve: it generates, and keeps the index right about what it holds."""

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve

from replica.cores import claim_cores
from replica.events import BlockTable
from replica.kvindex.fingerprint import FINGERPRINT_VERSION
from replica.kvindex.index import Index, connect
from replica.model import resolve
from replica.protocol import Chunk, Engine, GenerateRequest
from replica.publisher import Publisher
from replica.settings import ReplicaSettings

log = logging.getLogger("kvroute.replica")


@serve.deployment
class Replica:
    """The deployment; everything but Ray Serve's hooks is in the engine and the publisher."""

    async def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = ReplicaSettings.model_validate(settings)
        self.id = serve.get_replica_context().replica_id.unique_id
        self._engine = await start_engine(self._settings)
        log.info("reuse_cache: %s", self._settings.prefix_caching)
        self._redis = connect(self._settings.redis_url)
        self._publisher = self._make_publisher()
        self._tasks = [
            asyncio.create_task(self._publisher.run(), name="publisher"),
            asyncio.create_task(self._pump_events(), name="events"),
        ]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Chunks as the engine makes them; a caller that goes away aborts the request."""
        async with contextlib.aclosing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def reset_prefix_cache(self) -> bool:
        return await self._engine.reset_prefix_cache()

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        await self._engine.check()
        for task in self._tasks:
            if task.done():
                task.result()  # an index that is no longer fed goes wrong for good

    async def __del__(self) -> None:
        """Serve's shutdown hook: leave the index first, so that nobody is sent here any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._publisher.leave()
        await self._redis.aclose()
        await self._engine.close()

    def _make_publisher(self) -> Publisher:
        settings = self._settings
        facts = self._engine.facts
        table = BlockTable(
            model=settings.served_model_name,
            revision=settings.revision,
            block_size=facts.block_size,
        )
        return Publisher(
            Index(self._redis, settings.served_model_name),
            table,
            replica_id=self.id,
            facts=dataclasses.asdict(facts) | self._identity(),
            load=lambda: self._load(),
            lease_s=settings.lease_s,
        )

    def _identity(self) -> Mapping[str, Any]:
        return {
            "model": self._settings.served_model_name,
            "fingerprint_version": FINGERPRINT_VERSION,
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
        }

    def _load(self) -> Mapping[str, int]:
        return dataclasses.asdict(self._engine.load())

    async def _pump_events(self) -> None:
        async for events in self._engine.events():
            self._publisher.publish(events)


async def start_engine(settings: ReplicaSettings) -> Engine:
    """The engine that the settings name, ready to generate."""
    folder = await asyncio.to_thread(resolve, settings.model)
    if settings.engine == "simulated":
        return _start_simulated(settings, folder)
    _prepare_vllm(folder)
    from replica.engine import VllmEngine

    return await VllmEngine.start(settings, folder, claim_cores(settings.cores))


def _start_simulated(settings: ReplicaSettings, folder: str) -> Engine:
    from replica.simulated import SimulatedConfig, SimulatedEngine

    config = SimulatedConfig(
        block_size=settings.block_size,
        capacity_blocks=settings.simulated_blocks,
        max_model_len=settings.max_model_len or settings.simulated_blocks * settings.block_size,
        prefill_tokens_per_s=settings.simulated_prefill_tokens_per_s,
        decode_step_s=settings.simulated_decode_ms / 1000,
        decode_per_seq_s=0.0,
        max_running=settings.max_num_seqs or 256,
        prefix_caching=settings.prefix_caching,
    )
    return SimulatedEngine(config, tokenizer=folder if Path(folder).is_dir() else None)


def _prepare_vllm(folder: str) -> None:
    """Sets what vLLM reads when it is imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if Path(folder).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
