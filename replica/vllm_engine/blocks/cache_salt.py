"""vLLM's cache salt of a request, which counts from behind the blocks that everybody shares.

vLLM mixes a request's salt into the hash of its first block. Here it goes into the first block that
is the namespace's own: all blocks before it are shared with everybody, and none after it are.
Loaded in the engine's process, where blocks are hashed.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvroute.blocks.chain import Scope
from kvroute.contract.generation import GenerateRequest

ExtraKeys = Callable[[Request, int, int, int], tuple[tuple[Any, ...] | None, int]]
vllms: ExtraKeys = kv_cache_utils.generate_block_hash_extra_keys


def cache_salt(request: GenerateRequest) -> str | None:
    """SHARED_TOKENS:NAMESPACE; None: everybody shares all of its blocks."""
    return f"{request.shared_tokens}:{request.namespace}" if request.namespace else None


def scope_of(request: Request) -> Scope:
    shared_tokens, namespace = _parted(request.cache_salt or "")
    lora = request.lora_request.name if request.lora_request else ""
    return Scope(lora, namespace, shared_tokens)


def extra_keys(
    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[tuple[Any, ...] | None, int]:
    """vLLM's function of that name, but for the place of the salt."""
    salt = request.cache_salt
    shared_tokens, _ = _parted(salt or "")
    if not shared_tokens:
        return vllms(request, start_token_idx, end_token_idx, start_mm_idx)
    request.cache_salt = None
    try:
        keys, next_mm_idx = vllms(request, start_token_idx, end_token_idx, start_mm_idx)
    finally:
        request.cache_salt = salt
    if start_token_idx <= shared_tokens < end_token_idx:
        keys = (*(keys or ()), ("cache_salt", salt))
    return keys, next_mm_idx


@lru_cache(maxsize=4096)
def _parted(salt: str) -> tuple[int, str]:
    """Shared tokens, namespace. A salt without a number is all namespace."""
    shared_tokens, colon, namespace = salt.partition(":")
    return (int(shared_tokens), namespace) if colon and shared_tokens.isdecimal() else (0, salt)


kv_cache_utils.generate_block_hash_extra_keys = extra_keys
