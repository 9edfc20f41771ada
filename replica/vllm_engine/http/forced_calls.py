"""Keeps the arguments of tool calls objects, as every client expects.

If a request forces a call, a grammar makes the model write one. vLLM's grammar takes the schema of
a strict tool only: the arguments of other tools can be any JSON, such as a string. And vLLM's
handler of /v1/messages refuses the whole request if the arguments are no object, or are cut off.
"""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionToolsParam,
)
from vllm.tool_parsers import structural_tag_registry
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

from kvroute.replica.vllm_engine.http.request_run import CURRENT

# Name of the member of a call's input that has arguments which are no object. Anthropic's
# documents recommend this name.
INVALID = "INVALID_JSON"
DATA = "data: {"  # start of an event with JSON

vllm_resolve = structural_tag_registry.resolve_tool_strictness


def params_or_object(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which allows objects only. In place of vLLM's."""
    return {**(params or {"properties": {}}), "type": "object"}


def resolve_tool_strictness(
    tools: Sequence[Any], tool_choice: Any, strict_level: ToolStrictLevel
) -> Sequence[Any] | None:
    """Return the tools for the grammar of calls, in place of vLLM's.

    If a call is forced, each tool is strict. The schema of its arguments is that of an object.
    """
    mode = getattr(tool_choice, "mode", tool_choice)  # a choice among some tools has a mode
    if mode in (None, "auto", "none"):
        unforced: Sequence[Any] | None = vllm_resolve(tools, tool_choice, strict_level)
        return unforced
    strict = vllm_resolve(tools, tool_choice, ToolStrictLevel.PARAMETER) or ()
    return [_of_object(tool) for tool in strict]


def _of_object(tool: Any) -> Any:
    if isinstance(tool, ChatCompletionToolsParam):
        parameters = {"parameters": params_or_object(tool.function.parameters)}
        return tool.model_copy(update={"function": tool.function.model_copy(update=parameters)})
    if getattr(tool, "type", "") != "function":
        return tool
    return tool.model_copy(update={"parameters": params_or_object(tool.parameters)})


def install(serving: AnthropicServingMessages) -> None:
    """Make vLLM's handler of /v1/messages accept all arguments, and count the prompt only once."""
    vllm_whole, vllm_stream = serving.messages_full_converter, serving.message_stream_converter

    def whole(response: ChatCompletionResponse) -> Any:
        choice = response.choices[0]
        is_cut = False  # whether the last call is no JSON
        for call in choice.message.tool_calls:
            parsed, is_cut = _parsed(call.function.arguments)
            if not isinstance(parsed, dict):
                call.function.arguments = json.dumps({INVALID: call.function.arguments})
        message = vllm_whole(response)
        if is_cut and message.stop_reason == "tool_use" and isinstance(choice.stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", choice.stop_reason
        return message

    def stream(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        converted: AsyncGenerator[str, None] = vllm_stream(_counted(events))
        return converted

    serving.messages_full_converter = whole
    serving.message_stream_converter = stream


def _parsed(arguments: str) -> tuple[Any, bool]:
    """Return the value of a call's arguments, and whether they are no JSON."""
    try:
        return json.loads(arguments), False
    except ValueError:
        return None, True


async def _counted(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Yield the events of a chat; the first one has the number of cached tokens, as the last one.

    Without it, the first event of the stream reports the whole prompt as not cached.
    """
    is_first = True
    async for event in events:
        run = CURRENT.get()
        if is_first and event.startswith(DATA) and run is not None and run.counts is not None:
            is_first = False
            chunk = json.loads(event.removeprefix("data: "))
            if chunk.get("usage"):
                cached, created = run.counts
                details = {"cached_tokens": cached, "created_cache_tokens": created}
                chunk["usage"]["prompt_tokens_details"] = details
                event = f"data: {json.dumps(chunk)}\n\n"
        yield event
