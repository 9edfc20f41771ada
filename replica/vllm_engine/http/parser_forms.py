"""Finds vLLM's parsers for a model's tool calls and its reasoning, from its chat template.

A chat template writes the model's earlier answers in the same format in which the model writes new
answers. So the markers of that format in the template identify the parser.
"""

import re
from collections.abc import Sequence

NONE = "none"  # name of a parser that users set to have no parser
Forms = Sequence[tuple[tuple[str, ...], str]]
# Each item has regular expressions and the name of a parser. The parser is used if the template
# matches all of the expressions. If this is true for several items, the first one counts.
TOOL_FORMS: Forms = (
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>",), "hermes"),
    ((r"\[TOOL_CALLS\]",), "mistral"),
    ((r"<.tool▁call▁begin.>' ?\+ ?tool\['type'\]",), "deepseek_v3"),
    (("<.tool▁calls▁begin.>",), "deepseek_v31"),
    ((r"<\|tool_calls_section_begin\|>",), "kimi_k2"),
    ((r"<\|tool_call_start\|>",), "lfm2"),
    ((r"<\|tool_call>",), "gemma4"),
    ((r"<\|tool_call\|>",), "granite"),
    (("<start_function_call>",), "functiongemma"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    ((r"<\|python_start\|>",), "llama4_pythonic"),
    ((r"<\|start_header_id\|>", r'"name": <?function', '"parameters":'), "llama3_json"),
)
# This table lacks models that reason only if the text of the prompt asks for it. When such a model
# answers without reasoning, a parser would treat all of the answer as reasoning.
REASONING_FORMS: Forms = (
    (("<seed:think>",), "seed_oss"),
    ((r"\[THINK\]",), "mistral"),
    (("<think>", "<arg_key>"), "glm45"),
    (("<think>", "<.Assistant.>", r"\bthinking\b"), "deepseek_v3"),
    (("<think>", "<.Assistant.>"), "deepseek_r1"),
    (("<think>", r"<\|tool_calls_section_begin\|>"), "kimi_k2"),
    (("<think>", "<minimax:tool_call>"), "minimax_m2"),
    (("<think>", r"<\|im_start\|>", "reasoning_content"), "qwen3"),
)
# Model type in the configuration -> parser. The templates of these models do not identify it.
TOOL_TYPES = {"gpt_oss": "openai"}
REASONING_TYPES = {"gpt_oss": "openai_gptoss"}
# Part of a model's name -> parser. The template of the built-in model does not mention tools, so
# the model calls none by itself. If a request forces a tool call, a grammar makes the model write
# it as JSON, which this parser can read.
NAMES = {"SmolLM2-135M-Instruct": "hermes"}


def tool_parser(template: str | None, model_type: str, name: str) -> str | None:
    """Return the name of the parser of tool calls; None if it cannot be identified.

    Args:
        template: The chat template for requests with tools.
        model_type: The model type in the model's configuration.
        name: The model's folder, or its name on the Hugging Face Hub.
    """
    parser = TOOL_TYPES.get(model_type) or _by_form(template, TOOL_FORMS)
    return parser or next((parser for part, parser in NAMES.items() if part in name), None)


def reasoning_parser(template: str | None, model_type: str) -> str | None:
    """Return the name of the parser of reasoning; None if it cannot be identified."""
    return REASONING_TYPES.get(model_type) or _by_form(template, REASONING_FORMS)


def _by_form(template: str | None, forms: Forms) -> str | None:
    """Return the parser of the first item with expressions that all match the template."""
    for patterns, parser in forms:
        if template and all(re.search(pattern, template) for pattern in patterns):
            return parser
    return None
