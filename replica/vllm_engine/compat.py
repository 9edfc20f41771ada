"""Names of vLLM that are elsewhere in some of the supported versions (vllm_build.py).

Each name is tried where the newest version has it first. All other modules import such a name from
here.
"""

from collections.abc import Sequence
from typing import Any

try:  # vLLM 0.33
    from vllm.entrypoints.common.cli_args import (
        BaseFrontendArgs,
        make_arg_parser,
        validate_parsed_serve_args,
    )
except ImportError:  # vLLM 0.31 and 0.32
    from vllm.entrypoints.launchers.cli_args import (
        BaseFrontendArgs,
        make_arg_parser,
        validate_parsed_serve_args,
    )
try:  # vLLM 0.32 and newer
    from vllm.renderers.chat_utils import load_chat_template
except ImportError:  # vLLM 0.31
    from vllm.entrypoints.chat_utils import load_chat_template

__all__ = [
    "BaseFrontendArgs",
    "grammar_start",
    "load_chat_template",
    "make_arg_parser",
    "validate_parsed_serve_args",
]


def grammar_start(manager: Any, request: Any, delivered: Sequence[int]) -> int:
    """Return the index of the first delivered token that the grammar constrains.

    Args:
        manager: vLLM's StructuredOutputManager.
        request: vLLM's request.
        delivered: Tokens of the answer; reasoning comes first and has no grammar.
    """
    if hasattr(manager, "_get_constraint_bounds"):  # vLLM 0.32 and newer
        bounds = manager._get_constraint_bounds(request, delivered, spec_tokens_committed=True)
        return int(bounds.grammar_start)
    return int(manager._get_constraint_start(request, delivered, spec_tokens_committed=True))
