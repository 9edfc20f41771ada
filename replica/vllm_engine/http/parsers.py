"""Which of vLLM's parsers read a model's tool calls and its reasoning, by its chat template.

A template shows the model's earlier answers in the form in which the model writes new ones, so the
marks of that form tell the parser.
"""

import re
from collections.abc import Sequence

NONE = "none"  # as the name of a parser: no parser, also where one would be chosen
Forms = Sequence[tuple[tuple[str, ...], str]]
# All these patterns are in the template: this parser. The first match counts.
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
# Models that think only when a request asks for it in words are left out: such a parser would take
# all that they say without thinking for reasoning.
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
# By the model type of the configuration, where the template does not tell.
TOOL_TYPES = {"gpt_oss": "openai"}
REASONING_TYPES = {"gpt_oss": "openai_gptoss"}
# The built-in model's template has no tools: forced calls are written by a grammar, as JSON.
NAMES = {"SmolLM2-135M-Instruct": "hermes"}


def tool_parser(template: str | None, model_type: str, name: str) -> str | None:
    """Return the parser's name; None if neither template nor model tell.

    Args:
        template: the chat template for requests with tools.
        model_type: of the model's configuration.
        name: folder or hub name of the model.
    """
    found = TOOL_TYPES.get(model_type) or _by_form(template, TOOL_FORMS)
    return found or next((parser for part, parser in NAMES.items() if part in name), None)


def reasoning_parser(template: str | None, model_type: str) -> str | None:
    """Return the parser's name; None if neither template nor model tell."""
    return REASONING_TYPES.get(model_type) or _by_form(template, REASONING_FORMS)


def _by_form(template: str | None, forms: Forms) -> str | None:
    """Return the parser of the first form that the template writes."""
    for patterns, parser in forms:
        if template and all(re.search(pattern, template) for pattern in patterns):
            return parser
    return None
