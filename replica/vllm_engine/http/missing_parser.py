"""Rejects requests with tools if the replica has no parser for the model's tool calls.

vLLM itself rejects chats and messages with tools, but its error names options of vLLM's server. It
does not reject requests of the Responses API: their tool calls would be sent as plain text, which
no client recognises as a call.
"""

from typing import Any

from fastapi import FastAPI

MESSAGE = (
    "no parser is known for this model's tool calls: set tool_choice to none, or restart with "
    "--engine-arg tool_call_parser=NAME, where NAME is one of vLLM's tool call parsers"
)
VLLM_MESSAGE_END = "--tool-call-parser to be set"  # the end of vLLM's own error message


def install(app: FastAPI, tool_call_parser: str | None) -> None:
    """Install the check for /v1/responses, and kvroute's error message for the other routes.

    Call this after vLLM has set the application's state.
    """
    if (chats := getattr(app.state, "openai_serving_chat", None)) and not tool_call_parser:
        _replace_message(chats.online_renderer)
    serving = getattr(app.state, "openai_serving_responses", None)  # None for pooling models
    if serving is None or serving.use_harmony or tool_call_parser:
        return
    vllm_check = serving._validate_create_responses_input

    def check(request: Any) -> Any:
        if request.tools and request.tool_choice != "none":
            return serving.create_error_response(MESSAGE, param="tools")
        return vllm_check(request)

    serving._validate_create_responses_input = check


def _replace_message(renderer: Any) -> None:
    vllm_response = renderer.create_error_response

    def create_error_response(message: Any, *args: Any, **options: Any) -> Any:
        is_replaced = isinstance(message, str) and message.endswith(VLLM_MESSAGE_END)
        return vllm_response(MESSAGE if is_replaced else message, *args, **options)

    renderer.create_error_response = create_error_response
