"""LangChain's standard tests of chat models, for ChatOpenAI with the server of a suite.

pytest runs this file in an environment of its own, in which kvroute's packages are not installed.
"""

import os
from typing import Any

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL, MODEL = os.environ["KVROUTE_SUITE_URL"], os.environ["KVROUTE_SUITE_MODEL"]
ENOUGH = 300  # tokens for a tool call's arguments


class _Standard(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> Any:
        return ChatOpenAI

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestChat(_Standard):
    """With chats."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": f"{URL}/v1",
            "api_key": "none",
            "model": MODEL,
            "temperature": 0,
            "max_tokens": ENOUGH,
            "max_retries": 0,
            "stream_usage": True,
        }


class TestResponses(TestChat):
    """With responses."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}
