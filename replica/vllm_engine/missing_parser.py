"""A response with tools is refused where the model's calls cannot be read.

vLLM refuses chats and messages with tools if it has no parser for them. In its responses the calls
would be text, which no client takes for a call.
"""

from typing import Any

from fastapi import FastAPI

MESSAGE = "tools require --engine-arg tool_call_parser=NAME to be set, or tool_choice to be none"


def install(app: FastAPI, tool_call_parser: str | None) -> None:
    """Once vLLM's application has its state."""
    serving = getattr(app.state, "openai_serving_responses", None)  # pooling models have none
    if serving is None or serving.use_harmony or tool_call_parser:
        return
    theirs = serving._validate_create_responses_input

    def check(request: Any) -> Any:
        if request.tools and request.tool_choice != "none":
            return serving.create_error_response(MESSAGE, param="tools")
        return theirs(request)

    serving._validate_create_responses_input = check
