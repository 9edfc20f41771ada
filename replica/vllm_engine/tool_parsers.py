"""Which of vLLM's parsers reads a model's tool calls, by what its chat template writes.

A template shows the model's earlier calls in the form in which the model writes new ones, so the
marks of that form tell the parser.
"""

import re
from collections.abc import Sequence

NONE = "none"  # as tool_call_parser: no parser, also where one would be chosen
# All these patterns are in the template: this parser. The first match counts.
FORMS: Sequence[tuple[tuple[str, ...], str]] = (
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
# By the model type of the configuration, where the template does not tell.
TYPES = {"gpt_oss": "openai"}
# The built-in model's template has no tools: forced calls are written by a grammar, as JSON.
NAMES = {"SmolLM2-135M-Instruct": "hermes"}


def tool_parser(template: str | None, model_type: str, name: str) -> str | None:
    """Return the parser's name; None if neither template nor model tell.

    Args:
        template: the chat template for requests with tools.
        model_type: of the model's configuration.
        name: folder or hub name of the model.
    """
    if found := TYPES.get(model_type):
        return found
    for patterns, parser in FORMS:
        if template and all(re.search(pattern, template) for pattern in patterns):
            return parser
    return next((parser for part, parser in NAMES.items() if part in name), None)
