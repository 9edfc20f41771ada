"""Makes vLLM's engine arguments from kvroute's settings and from the user's --engine-args."""

from collections.abc import Sequence
from typing import Any

from vllm.config import KVEventsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from kvroute.contract.adapters import sufficient_rank
from kvroute.process.builtin_model import is_builtin
from kvroute.process.memory import memory_bytes
from kvroute.process.tracing import traces_endpoint
from kvroute.replica.vllm_engine.core.endpoints import join_endpoints
from kvroute.replica.vllm_engine.core.subscription import Subscription
from kvroute.replica.vllm_engine.dtype import choose_dtype
from kvroute.replica.vllm_engine.engine_args import checked
from kvroute.replica.vllm_engine.host.args import host_args
from kvroute.settings.replica import ReplicaSettings


def engine_args(
    settings: ReplicaSettings, model: str, subscriptions: Sequence[Subscription]
) -> AsyncEngineArgs:
    """Return vLLM's arguments from kvroute's settings and from the user's --engine-args.

    An argument that is in both has the value from kvroute's settings. All other arguments have
    vLLM's defaults, except a few on CPUs.

    Args:
        settings: The replica's settings.
        model: A folder, or a name on the Hugging Face Hub.
        subscriptions: The receivers of KV events, one for each rank.
    """
    on_cpu = current_platform.is_cpu()
    scheduler = "KvrouteScheduler" if on_cpu else "KvrouteAsyncScheduler"
    ours: dict[str, Any] = {
        "model": model,
        "served_model_name": settings.served_model_name,
        "dtype": choose_dtype(settings.dtype, is_builtin=is_builtin(settings.model), on_cpu=on_cpu),
        "block_size": settings.block_size,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "data_parallel_size": settings.data_parallel_size,
        # None is vLLM's default. vLLM then turns caching off for models that would give wrong
        # results with it, such as embedding models that pool over all tokens.
        "enable_prefix_caching": None if settings.prefix_caching else False,
        "stream_interval": settings.stream_interval,
        "scheduler_cls": f"kvroute.replica.vllm_engine.core.scheduler.{scheduler}",
        "scheduling_policy": "priority",
        "kv_events_config": KVEventsConfig(
            enable_kv_cache_events=settings.prefix_caching,
            publisher="zmq" if settings.prefix_caching else "null",
            endpoint=join_endpoints(subscription.endpoint for subscription in subscriptions),
            replay_endpoint=join_endpoints(
                subscription.replay_endpoint for subscription in subscriptions
            ),
        ),
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "revision": settings.revision or None,
        "otlp_traces_endpoint": traces_endpoint(),
    }
    if settings.adapters or settings.lora_root:
        ours["enable_lora"] = True
        ours["max_loras"] = settings.max_loras
        ours["max_cpu_loras"] = settings.loras_in_memory
        added_rank = settings.max_lora_rank if settings.lora_root else 0
        ours["max_lora_rank"] = sufficient_rank(settings.adapters, at_least=added_rank)
    ours |= host_args(settings, node_bytes=memory_bytes(), on_cpu=on_cpu)
    cpu_defaults = {
        "kv_cache_memory_bytes": settings.kv_cache_memory_mb << 20,
        "enforce_eager": True,
        # With several ranks, vLLM would start an additional process for each rank, and bind all of
        # these processes to the first core.
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else None,
    }
    args = (cpu_defaults if on_cpu else {}) | checked(settings.engine_args) | ours
    return AsyncEngineArgs(**{name: value for name, value in args.items() if value is not None})
