"""A request with tools is refused if the replica cannot read the model's tool calls.

vLLM refuses chats and messages with tools if it has no parser for them, and names options of its
own server. In its responses the calls would be text, which no client takes for a call.
"""

from typing import Any

from fastapi import FastAPI

MESSAGE = (
    "how this model writes tool calls is not known: restart with --engine-arg tool_call_parser=NAME"
    ", where NAME is one of vLLM's tool call parsers, or set tool_choice to none"
)
VLLMS = "--tool-call-parser to be set"  # the end of what vLLM says


def install(app: FastAPI, tool_call_parser: str | None) -> None:
    """Install the refusals, once vLLM's application has its state."""
    if (chats := getattr(app.state, "openai_serving_chat", None)) and not tool_call_parser:
        _say_what_helps(chats.online_renderer)
    serving = getattr(app.state, "openai_serving_responses", None)  # pooling models have none
    if serving is None or serving.use_harmony or tool_call_parser:
        return
    theirs = serving._validate_create_responses_input

    def check(request: Any) -> Any:
        if request.tools and request.tool_choice != "none":
            return serving.create_error_response(MESSAGE, param="tools")
        return theirs(request)

    serving._validate_create_responses_input = check


def _say_what_helps(renderer: Any) -> None:
    theirs = renderer.create_error_response

    def create_error_response(message: Any, *args: Any, **options: Any) -> Any:
        is_ours = isinstance(message, str) and message.endswith(VLLMS)
        return theirs(MESSAGE if is_ours else message, *args, **options)

    renderer.create_error_response = create_error_response
