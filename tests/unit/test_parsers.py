"""The parsers of tool calls and of reasoning follow from the chat template."""

from pathlib import Path

import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.replica.vllm_engine.http.parser_forms import reasoning_parser, tool_parser

TEMPLATES = Path(__file__).parents[1] / "templates"
PARSERS = {
    "deepseek_r1_distill": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v31",
    "gemma3": None,  # has no tools
    "glm4_moe": "glm45",
    "granite_3_3": "granite",
    "granite_4": "hermes",
    "hermes3": "hermes",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    "mistral_nemo": "mistral",
    "mistral_small_3_2": "mistral",
    "phi3_5": None,
    "qwen3": "hermes",
    "qwen3_5": "qwen3_coder",
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_template_identifies_the_parser_of_tool_calls(name: str) -> None:
    template = (TEMPLATES / f"{name}.jinja").read_text()
    assert tool_parser(template, "any", "/models/any") == PARSERS[name]


def test_a_model_type_and_the_built_in_model_are_known_without_a_template() -> None:
    assert tool_parser(None, "gpt_oss", "openai/gpt-oss-20b") == "openai"
    assert tool_parser("no tools", "llama", f"/cache/{BUILTIN_MODEL}-v1") == "hermes"
    assert tool_parser(None, "llama", "any") is None


# For all other models, the template has no reasoning, or the model reasons only if the text of the
# prompt asks for it.
REASONING = {
    "deepseek_r1_distill": "deepseek_r1",
    "deepseek_v3_1": "deepseek_v3",
    "glm4_moe": "glm45",
    "qwen3": "qwen3",
    "qwen3_5": "qwen3",
}


@pytest.mark.parametrize("name", [path.stem for path in sorted(TEMPLATES.glob("*.jinja"))])
def test_a_template_identifies_the_parser_of_reasoning(name: str) -> None:
    if name != "gpt_oss":
        template = (TEMPLATES / f"{name}.jinja").read_text()
        assert reasoning_parser(template, "any") == REASONING.get(name)


def test_the_model_type_identifies_the_parser_of_reasoning_if_the_template_does_not() -> None:
    assert reasoning_parser(None, "gpt_oss") == "openai_gptoss"
    assert reasoning_parser(None, "llama") is None
