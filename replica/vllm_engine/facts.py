"""The facts of a vLLM engine that its replica publishes."""

from functools import partial

from msgspec.structs import replace
from vllm.v1.engine.async_llm import AsyncLLM

from kvroute.contract.records import EngineFacts
from kvroute.replica.engine.pins import pin_budget
from kvroute.replica.vllm_engine.blocks.division import Division
from kvroute.replica.vllm_engine.host.claims import prefill_claim, reload_claim
from kvroute.replica.vllm_engine.host.tier import OpenTiers
from kvroute.settings.replica import ReplicaSettings


def facts_of(
    llm: AsyncLLM,
    settings: ReplicaSettings,
    division: Division,
    opened: OpenTiers,
    *,
    content_format: str,
    tool_parser: str,
) -> EngineFacts:
    """Return the facts of one rank.

    Args:
        llm: The engine.
        settings: The replica's settings.
        division: How the rank divides its cache.
        opened: The tiers behind its host memory.
        content_format: Form of message contents that the chat template expects.
        tool_parser: vLLM's parser of tool calls.
    """
    config = llm.vllm_config
    prefill = prefill_claim()
    prefix_caching = bool(config.cache_config.enable_prefix_caching)
    capacity_blocks = division.capacity_blocks(division.blocks)
    host = division.host_tier(reload_claim())
    pins_in = partial(
        pin_budget,
        settings.pin_share if prefix_caching else 0.0,
        block_size=division.unit,
        max_model_len=config.model_config.max_model_len,
    )
    return EngineFacts(
        block_size=division.unit,
        capacity_blocks=capacity_blocks,
        max_model_len=config.model_config.max_model_len,
        prefill_tokens_per_s=prefill.tokens_per_s,
        attention_tokens=prefill.attention_tokens,
        prefix_caching=prefix_caching,
        pin_blocks=pins_in(capacity_blocks=capacity_blocks),
        max_num_seqs=config.scheduler_config.max_num_seqs,
        step_tokens=config.scheduler_config.max_num_batched_tokens,
        max_variants=settings.loras_in_memory,
        engine="vllm",
        content_format=content_format,
        tool_parser=tool_parser,
        reasoning_parser=config.structured_outputs_config.reasoning_parser,
        layout=division.layout if prefix_caching else None,
        host=host and replace(host, pin_blocks=pins_in(capacity_blocks=host.blocks)),
        disk=division.disk_tier(opened.disk_bytes_per_s) if opened.disk_bytes_per_s else None,
    )
