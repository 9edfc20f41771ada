"""What kvroute replaces inside vLLM, with what, and why. No other module changes vLLM's names.

Most of kvroute's changes need no replacement: vLLM takes the classes of the scheduler, the KV
connector, the memory tiers and the eviction policy by name from its own options. The scheduler's
module also adds methods to vLLM's EngineCore, all of which begin with `kvroute_`.
"""

import inspect
from collections.abc import Iterable
from pkgutil import resolve_name
from typing import NamedTuple


class Replacement(NamedTuple):
    """A name of vLLM, and what stands in its place."""

    name: str
    by: str  # in this package
    why: str
    is_new: bool = False  # whether the oldest supported vLLM does not have the name


# For all processes of an engine, when vLLM imports kvroute's scheduler there.
IN_ENGINE = (
    Replacement(
        "vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys",
        "blocks.cache_salt.extra_keys",
        "Tenants share the blocks of prefixes that are declared for all.",
    ),
    Replacement(
        "vllm.distributed.kv_events.EventPublisherFactory._registry[zmq]",
        "core.endpoints.RankPublisher",
        "Each data parallel rank publishes its events at an address of its own.",
    ),
)

# For the replica's process, before it starts an engine.
BEFORE_START = (
    Replacement(
        "vllm.v1.engine.coordinator.DPCoordinatorProc.run_coordinator",
        "process.die_with_parent.run_coordinator",
        "The coordinator of ranks ends when the replica is killed.",
    ),
)
BEFORE_START_ON_CPU = tuple(
    Replacement(
        f"vllm.v1.engine.{module}.get_mp_context",
        "process.fork_server.mp_context",
        "Engines start in seconds, as they need not import vLLM.",
    )
    for module in ("coordinator", "utils")
)

# For the replica's process, before vLLM's HTTP application is built.
IN_APPLICATION = (
    Replacement(
        "vllm.sampling_params.SamplingParams._validate_structured_outputs",
        "grammar.check.validate_unless_checked",
        "A grammar is checked in a process of its own, with limits, and only once.",
    ),
    Replacement(
        "vllm.sampling_params.SamplingParams.update_from_tokenizer",
        "http.sampling_checks.update_from_tokenizer",
        "Too many tokens in bad_words would end the engine.",
    ),
    Replacement(
        "vllm.multimodal.media.MEDIA_CONNECTOR_REGISTRY.name2class[http]",
        "http.media.MediaLoader",
        "An image that cannot be loaded is the client's error, and is not tried elsewhere.",
    ),
    Replacement(
        "vllm.entrypoints.openai.responses.protocol.ResponsesResponse.from_request",
        "http.whole_response.from_request",
        "Clients with strict types need fields that vLLM leaves out.",
    ),
    Replacement(
        "vllm.entrypoints.openai.responses.streaming_events._to_stream_logprobs",
        "http.whole_response.with_bytes",
        "Clients with strict types need the bytes of tokens, which vLLM leaves out.",
        is_new=True,
    ),
    Replacement(
        "vllm.entrypoints.serve.exception_handling.handlers.validation._MAX_REPORTED_ERRORS",
        "http.fail_fast.MAX_ERRORS",
        "The error of the type that the client means may be far down in the list.",
        is_new=True,
    ),
    Replacement(
        "vllm.tool_parsers.structural_tag_registry.resolve_tool_strictness",
        "http.forced_calls.resolve_tool_strictness",
        "A forced call has arguments of the tool's schema.",
        is_new=True,
    ),
    Replacement(
        "vllm.tool_parsers.utils._params_or_empty_object",
        "http.forced_calls.params_or_object",
        "The arguments of a forced call are an object, also if the schema names no type.",
        is_new=True,
    ),
    *(
        Replacement(
            f"vllm.{module}.{name}",
            f"http.repeatable.{name.upper()}",
            "Another replica that continues a response repeats its ids and times.",
        )
        for module, *names in (
            ("utils", "uuid"),
            ("entrypoints.generate.base.serving", "time"),
            ("entrypoints.openai.chat_completion.protocol", "time"),
            ("entrypoints.openai.chat_completion.serving", "time"),
            ("entrypoints.openai.completion.protocol", "time"),
            ("entrypoints.openai.completion.serving", "time"),
            ("entrypoints.openai.responses.protocol", "time"),
            ("entrypoints.openai.responses.serving", "time"),
            ("entrypoints.anthropic.protocol", "time"),
            ("entrypoints.anthropic.serving", "time", "uuid"),
        )
        for name in names
    ),
)

# Parts of single objects. The modules in `by` change them, since only these have the objects.
OF_OBJECTS = (
    Replacement("BlockPool.__class__", "blocks.pool.fingerprint", "Events have fingerprints."),
    Replacement(
        "BlockPool.free_block_queue",
        "blocks.free_queue.FreeQueue",
        "Blocks are evicted in kvroute's order.",
    ),
    Replacement(
        "StructuredOutputManager.__class__",
        "grammar.backends.Grammars",
        "Each request has its own backend of grammars, and grammars continue after an answer.",
    ),
    Replacement(
        "OffloadingConnector.__class__, and those of its managers",
        "host.tier.SchedulerHostTier",
        "Host memory has kvroute's order of eviction, and publishes its blocks.",
    ),
    Replacement(
        "AsyncLLM, as vLLM's HTTP handlers see it",
        "http.app._Client",
        "The tokens and the bytes of a response are sent together.",
    ),
    Replacement(
        "BaseRenderer.render_chat_async, render_cmpl_async",
        "http.app.RouterPrompts",
        "The router has rendered the prompt.",
    ),
    Replacement(
        "BaseRenderer._mm_processor_cache",
        "http.media.process_once",
        "An image is never expected in an engine that has not received it.",
    ),
    Replacement(
        "OpenAIServingModels.lora_requests",
        "http.requested_adapters.RequestedAdapters",
        "An adapter is known to the requests of its tenant only.",
    ),
    Replacement(
        "APIRoute.dependant.body_params",
        "http.fail_fast.install",
        "A wrong body of 450 KB would stop all streams for 8 s.",
    ),
    Replacement(
        "OpenAIServingResponses._validate_create_responses_input",
        "http.missing_parser.install",
        "Tool calls that nobody parses are refused, in kvroute's words.",
    ),
    Replacement(
        "AnthropicServingMessages.messages_full_converter, message_stream_converter",
        "http.forced_calls.install",
        "Arguments that are no object are no error, and a stream counts the prompt once.",
    ),
    Replacement(
        "AnthropicServingMessages.to_chat_completion_request",
        "http.inline_system.install",
        "A system message inside a conversation stays there, so the prompt's prefix stays cached.",
    ),
)


def apply(replacements: Iterable[Replacement]) -> None:
    """Replace these names of vLLM in this process. A second call changes nothing."""
    for name, by, _, is_new in replacements:
        place, _, last = name.rpartition(".")
        owner, ours = resolve_name(place), resolve_name(f"{__package__}.{by}")
        if last.endswith("]"):
            mapping, _, key = last.removesuffix("]").partition("[")
            getattr(owner, mapping)[key] = ours
            continue
        if is_new and not hasattr(owner, last):
            continue
        is_bound = isinstance(inspect.getattr_static(owner, last), staticmethod | classmethod)
        setattr(owner, last, staticmethod(ours) if is_bound else ours)
