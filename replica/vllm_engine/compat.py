"""Names of vLLM that are in different modules in the supported versions (vllm_build.py).

The module in the newest version is tried first. kvroute's other modules import these names from
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
    "source_of_pulls",
    "validate_parsed_serve_args",
]


def source_of_pulls() -> Any:
    """Return how vLLM's metrics name tokens from other replicas; None: they have no such name."""
    try:  # vLLM 0.32 and newer
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:  # vLLM 0.31
        return None
    return CacheHitSource.P2P


def grammar_start(manager: Any, request: Any, delivered: Sequence[int]) -> int:
    """Return the index of the first delivered token that the grammar constrains.

    Args:
        manager: vLLM's StructuredOutputManager.
        request: vLLM's request.
        delivered: The first tokens of the answer. The grammar does not constrain its reasoning.
    """
    if hasattr(manager, "_get_constraint_bounds"):  # vLLM 0.32 and newer
        bounds = manager._get_constraint_bounds(request, delivered, spec_tokens_committed=True)
        return int(bounds.grammar_start)
    return int(manager._get_constraint_start(request, delivered, spec_tokens_committed=True))
