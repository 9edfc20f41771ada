"""The engine arguments that --engine-args does not accept, since kvroute sets them itself."""

import re
from collections.abc import Mapping

# OWNED: vLLM's name -> kvroute's option for the same purpose.
# FIXED: vLLM's name -> why users cannot change it.
OWNED = {
    "model": "--model",
    "served_model_name": "--served-model-name",
    "revision": "--revision",
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "stream_interval": "--stream-interval",
    "block_size": "--block-size",
    "enable_prefix_caching": "--prefix-caching",
    "tensor_parallel_size": "--gpus-per-replica",
    "data_parallel_size": "--data-parallel-size",
    "enable_lora": "--lora-root",
    "max_lora_rank": "--max-lora-rank",
    "max_loras": "--max-loras",
    "max_cpu_loras": "--max-cpu-loras",
    "lora_modules": "--lora",
    "otlp_traces_endpoint": "the environment variable OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
}
FIXED = {
    "kv_events_config": "kvroute's index needs the engine's KV events",
    "scheduler_cls": "pins need kvroute's scheduler",
    "async_scheduling": "kvroute chooses the scheduler",
    "scheduling_policy": "the router sets the order of requests",
    "disable_log_stats": "routers need the engine's statistics",
    "tokenizer": "routers use the model's own tokenizer",
    "tokenizer_revision": "routers use the model's own tokenizer",
    "skip_tokenizer_init": "replicas need the tokenizer, since they send text",
    "pipeline_parallel_size": "a replica gets the GPUs of --gpus-per-replica, for tensor "
    "parallelism",
    "data_parallel_rank": "the router chooses the rank",
    "data_parallel_hybrid_lb": "the router chooses the rank",
    "data_parallel_external_lb": "the router chooses the rank",
    "data_parallel_multi_port_external_lb": "the router chooses the rank",
    "data_parallel_start_rank": "a replica has all of its ranks, from rank 0",
    "data_parallel_size_local": "a replica has all of its ranks on one node",
    "data_parallel_address": "a replica has all of its ranks on one node",
    "data_parallel_rpc_port": "a replica has all of its ranks on one node",
    "data_parallel_backend": "each replica starts its ranks as processes of its own",
    "device_ids": "Ray assigns the GPUs",
    "tool_server": "clients run their tools themselves",
    "sse_keep_alive_interval": "all bytes of a response must belong to tokens, so that another "
    "replica can continue it",
    "enable_prompt_tokens_details": "responses always report the cached tokens",
}


# Words in vLLM's messages -> kvroute's option that helps, too.
HELPFUL = {"gpu_memory_utilization": "--kv-cache-memory-mb (on CPUs)"}


def options_for(text: str) -> str:
    """Return kvroute's options for the engine arguments that a message of vLLM mentions.

    They are joined by "and". The text is empty if there are none.
    """
    options = {(OWNED | HELPFUL).get(word, "") for word in re.findall(r"\w+_\w+", text)}
    return " and ".join(sorted(option for option in options if option.startswith("--")))


def refusal(engine_args: Mapping[str, object]) -> str | None:
    """Return why users cannot set one of these arguments, and what to do; None: they can."""
    for name in engine_args:
        if name in OWNED:
            return f"{name} cannot be set here; use {OWNED[name]}"
        if name in FIXED:
            return f"{name} cannot be changed ({FIXED[name]}); leave it out"
    return None
