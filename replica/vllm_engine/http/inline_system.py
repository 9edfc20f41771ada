"""Keeps system messages in the middle of a conversation of /v1/messages in their places.

Claude Code sends reminders as system messages, some of them after every tool result. Many chat
templates accept a system message only at the front, so vLLM moves all system messages there. A new
system message then changes the beginning of the prompt, and the rest of the prompt is no longer a
cache hit. Here, such a message stays in its place (system_places.py).
"""

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.hf import HfRenderer, resolve_chat_template

from kvroute.replica.vllm_engine.http.system_places import Message, Render, place_for, put_in_place

# A tool for the example conversations of system_places.py.
_F = {"name": "f", "description": "Does nothing"}
_TOOLS = [{"type": "function", "function": {**_F, "parameters": {"type": "object"}}}]


def install(serving: AnthropicServingMessages, *, merges: bool) -> None:
    """Make vLLM's handler of /v1/messages leave inline system messages in place.

    Args:
        serving: vLLM's handler.
        merges: True: change nothing, so that vLLM moves the messages to the front if the template
            requires it.
    """
    if merges:
        return
    convert, render = serving.to_chat_completion_request, _render_of(serving)
    place = place_for(render) if render else "joined"

    def converted(request: Any, **options: Any) -> ChatCompletionRequest:
        chat = convert(request, **{**options, "merge_inline_system": False})
        chat.messages = put_in_place(chat.messages, place)
        return chat

    serving._merge_inline_system = False
    serving.to_chat_completion_request = converted


def _render_of(serving: AnthropicServingMessages) -> Render | None:
    """Return a function that renders chats; None if vLLM renders them without a chat template."""
    online = serving.online_renderer
    renderer = online.renderer
    if not isinstance(renderer, HfRenderer) or renderer.tokenizer is None:
        return None
    tokenizer = renderer.tokenizer
    templates = {
        has_tools: resolve_chat_template(
            tokenizer,
            online.chat_template,
            _TOOLS if has_tools else None,
            model_config=online.model_config,
        )
        for has_tools in (False, True)
    }

    def render(messages: Sequence[Message]) -> str:
        has_tools = any(message["role"] == "tool" for message in messages)
        return str(
            tokenizer.apply_chat_template(
                list(messages),
                tools=_TOOLS if has_tools else None,
                chat_template=templates[has_tools],
                tokenize=False,
            )
        )

    return render
