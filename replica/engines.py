"""Starts the engine that the replica's settings name, with all its ranks.

Only the module of that engine is imported.
"""

import asyncio
import importlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvroute.contract.records import MAX_UNFIT, TierFacts
from kvroute.features.engine_sides import engine_features
from kvroute.process import vllm_build
from kvroute.process.builtin_model import resolve
from kvroute.process.memory import memory_bytes
from kvroute.replica.engine.pins import pin_budget
from kvroute.replica.engine.protocol import Engine
from kvroute.replica.vllm_engine.process import fork_server
from kvroute.replica.vllm_engine.process.cpu_affinity import claim_cores
from kvroute.settings.replica import ReplicaSettings

if TYPE_CHECKING:
    from kvroute.replica.sim_engine.simulated import SimulatedEngine

log = logging.getLogger("kvroute.replica")

# Context length for a model whose configuration has no max_position_embeddings.
DEFAULT_CONTEXT_TOKENS = 131_072
SIMULATED_TOKEN_BYTES = 131_072  # size of the KV of one token in bytes, as in an 8B model


async def start_engines(
    settings: ReplicaSettings, replica_id: str = "", *, host: str = "127.0.0.1", secret: bytes = b""
) -> Sequence[Engine]:
    """Start the engine that the settings name, and return one object for each of its ranks.

    Args:
        settings: The replica's settings.
        host: The address on which the engine may listen for other replicas.
        secret: The replica's secret; empty: the engine does not listen.
        replica_id: The replica's id. With it, the replica claims an attached server, that is, one
            that kvroute did not start.
    """
    folder = await asyncio.to_thread(resolve, settings.model)
    if settings.is_attached:
        from kvroute.replica.attached_engine.start import start_attached

        return await start_attached(settings, folder, replica_id)
    if settings.engine == "simulated":
        simulated = [_simulated(settings, folder) for _ in range(settings.data_parallel_size)]
        for engine in simulated if secret else ():
            engine.listen(settings, host, secret)
        return simulated
    for name, value in settings.environment.items():
        os.environ.setdefault(name, value)
    if settings.engine_hooks == "off":
        return await _start_unpatched(settings, folder, "")
    cores = claim_cores(settings.cores)
    prepare_vllm(folder, cores.threads(settings.data_parallel_size))
    if unfit := await asyncio.to_thread(_unfit):
        reason = f"pins, host memory and continued answers are off: {unfit}"[:MAX_UNFIT]
        log.warning("kvroute's changes do not fit the installed vLLM: %s", reason)
        return await _start_unpatched(settings, folder, reason)
    from kvroute.replica.vllm_engine.async_llm import VllmEngine
    from kvroute.replica.vllm_engine.optional_parts import described, misfits

    off = await asyncio.to_thread(misfits)
    for part, reason in off.items():
        log.warning("kvroute's changes do not fit vLLM: %s: off, because %s", part.name, reason)
    return await VllmEngine.start(
        settings, folder, cores, host=host, secret=secret, unfit=described(off, MAX_UNFIT)
    )


async def _start_unpatched(settings: ReplicaSettings, folder: str, unfit: str) -> Sequence[Engine]:
    from kvroute.replica.attached_engine.start import start_unpatched

    return await start_unpatched(settings, folder, unfit)


def _unfit() -> str:
    """Return why kvroute's changes of vLLM do not fit the installed version; empty: they fit."""
    try:
        importlib.import_module("kvroute.replica.vllm_engine.async_llm")
    except (ImportError, AttributeError) as error:
        return str(error)
    from kvroute.replica.vllm_engine.optional_parts import misfit_of_the_rest

    return misfit_of_the_rest()


def _simulated(settings: ReplicaSettings, folder: str) -> "SimulatedEngine":
    from kvroute.replica.sim_engine.config import SimulatedConfig
    from kvroute.replica.sim_engine.simulated import SimulatedEngine

    capacity_tokens = settings.simulated_blocks * settings.block_size
    max_model_len = min(capacity_tokens, settings.max_model_len or _context_tokens(folder))
    config = SimulatedConfig(
        model=settings.served_model_name,
        revision=settings.revision,
        block_size=settings.block_size,
        capacity_blocks=settings.simulated_blocks,
        max_model_len=max_model_len,
        prefill_tokens_per_s=settings.simulated_prefill_tokens_per_s,
        decode_step_s=settings.simulated_decode_ms / 1000,
        decode_per_seq_s=0.0,
        max_running=settings.max_num_seqs or 256,
        stream_interval=settings.stream_interval,
        prefix_caching=settings.prefix_caching,
        pin_share=settings.pin_share,
        host=_simulated_host(settings, max_model_len),
        adapters=frozenset(adapter.name for adapter in settings.adapters),
        max_loras=settings.max_loras,
        max_cpu_loras=settings.loras_in_memory,
        can_add_adapters=settings.lora_root is not None,
    )
    return SimulatedEngine(
        config,
        tokenizer=folder if Path(folder).is_dir() else None,
        features=engine_features(settings.environment),
    )


def _simulated_host(settings: ReplicaSettings, max_model_len: int) -> TierFacts | None:
    """Return the host tier (the cache in host memory) of one rank, or None if it has none."""
    block_bytes = settings.block_size * SIMULATED_TOKEN_BYTES
    blocks = settings.host_cache_bytes(memory_bytes()) // block_bytes
    if not blocks or not settings.prefix_caching:
        return None
    pin_blocks = pin_budget(
        settings.pin_share,
        capacity_blocks=blocks,
        block_size=settings.block_size,
        max_model_len=max_model_len,
    )
    return TierFacts(blocks, block_bytes, 1e9 * settings.simulated_host_gb_per_s, pin_blocks)


def prepare_vllm(folder: str, threads: int) -> None:
    """Set the environment variables that vLLM reads when it is imported.

    With a build of vLLM for CPUs, also start the fork server for vLLM's processes.

    Args:
        folder: The model's folder or its name on the Hugging Face Hub.
        threads: The number of threads that each engine computes with on CPUs.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if Path(folder).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not vllm_build.is_for_gpus():
        # Run the worker in the engine's process.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # Without this, the first request for logprobs waits 14 s for a compilation.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        fork_server.start(threads)


def _context_tokens(folder: str) -> int:
    """Return the model's maximum context, from its configuration if there is one."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
    except OSError:
        return DEFAULT_CONTEXT_TOKENS
    return int(config.get("max_position_embeddings", DEFAULT_CONTEXT_TOKENS))
