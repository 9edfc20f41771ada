"""vLLM's schedulers without a model. Each step draws the same token for each request."""

from typing import Any

BLOCK = 16  # number of tokens in a block


def scheduler_of(kind: Any, *specs: Any, blocks: int, **options: Any) -> Any:
    """Return a scheduler that is configured as in a replica.

    Args:
        kind: The scheduler's class.
        specs: The groups of the KV cache (kv_managers.py).
        blocks: The number of blocks.
        options: vLLM's engine arguments.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from kvroute.process.builtin_model import BUILTIN_MODEL, resolve

    model = str(resolve(BUILTIN_MODEL))
    config = AsyncEngineArgs(model=model, block_size=BLOCK, **options).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks + 1  # one is vLLM's null block
    groups = [KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(specs)]
    cache = KVCacheConfig(blocks + 1, [], groups)
    sizes = resolve_kv_cache_block_sizes(cache, config)
    return kind(
        *(config, cache, StructuredOutputManager(config)),
        block_size=sizes[0],
        hash_block_size=sizes[1],
    )


def request_of(
    name: str,
    *,
    tokens: int,
    first_id: int,
    priority: int = 0,
    max_tokens: int = 100,
    extra_args: dict[str, Any] | None = None,
) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256_cbor)
    return Request(
        name,
        list(range(first_id, first_id + tokens)),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args),
        None,
        priority=priority,
        block_hasher=get_request_block_hasher(BLOCK, sha256_cbor),
    )


def step(scheduler: Any) -> dict[str, int]:
    """Run a step; return the number of tokens that it computed for each request.

    Each request whose prompt is computed gets a token.
    """
    from vllm.v1.outputs import ModelRunnerOutput

    planned = scheduler.schedule()
    computed: dict[str, int] = planned.num_scheduled_tokens
    requests = [scheduler.requests[name] for name in computed]
    drawn = [
        [7] if request.num_computed_tokens >= request.num_tokens else [] for request in requests
    ]
    numbers = {name: number for number, name in enumerate(computed)}
    scheduler.update_from_output(planned, ModelRunnerOutput([*computed], numbers, drawn))
    return computed
