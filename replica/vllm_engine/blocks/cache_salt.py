"""Separates the cached blocks of namespaces, except those of shared prefixes.

A namespace is a tenant, or a group of requests with the same `cache_salt`. vLLM mixes the salt into
the hash of a prompt's first block, so requests with different salts share no blocks. But a prompt
can begin with a prefix that was declared for all namespaces; `shared_tokens` is its length. Here,
the salt is mixed into the hash of the first block after this prefix.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvroute.blocks.chain import Scope
from kvroute.contract.generation import GenerateRequest

ENCODED = "enc_dec"  # vLLM's type of prompts for models with an encoder and a decoder

ExtraKeys = Callable[[Request, int, int, int], tuple[tuple[Any, ...] | None, int]]
vllm_extra_keys: ExtraKeys = kv_cache_utils.generate_block_hash_extra_keys


def cache_salt(request: GenerateRequest) -> str | None:
    """Return vLLM's salt "SHARED_TOKENS:NAMESPACE", or None if the request has no namespace."""
    return f"{request.shared_tokens}:{request.namespace}" if request.namespace else None


def salted(prompt: Mapping[str, Any], request: GenerateRequest) -> Mapping[str, Any]:
    """Return a prompt for vLLM with the request's salt, if its blocks can be cached.

    Models with an encoder cache no prefixes. vLLM has not rendered the prompt with which it finds
    out the language of a recording, so that prompt has no type.
    """
    salt = cache_salt(request)
    is_cached = prompt.get("type", ENCODED) != ENCODED
    return {**prompt, "cache_salt": salt} if salt and is_cached else prompt


def scope_of(request: Request) -> Scope:
    """Return the adapter and the namespace that the request's fingerprints depend on."""
    shared_tokens, namespace = _parse(request.cache_salt or "")
    lora = request.lora_request.name if request.lora_request else ""
    return Scope(lora, namespace, shared_tokens)


def extra_keys(
    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[tuple[Any, ...] | None, int]:
    """Return what a block's hash depends on besides its tokens, and the index of the next image.

    vLLM's function adds the salt to a prompt's first block. This function, which replaces it, adds
    the salt to the first block after the shared tokens.
    """
    salt = request.cache_salt
    shared_tokens, _ = _parse(salt or "")
    if not shared_tokens:
        return vllm_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)
    request.cache_salt = None
    try:
        keys, next_mm_idx = vllm_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)
    finally:
        request.cache_salt = salt
    if start_token_idx <= shared_tokens < end_token_idx:
        keys = (*(keys or ()), ("cache_salt", salt))
    return keys, next_mm_idx


@lru_cache(maxsize=4096)
def _parse(salt: str) -> tuple[int, str]:
    """Return the number of shared tokens and the namespace.

    A salt without a number is a namespace that shares no tokens.
    """
    shared_tokens, colon, namespace = salt.partition(":")
    return (int(shared_tokens), namespace) if colon and shared_tokens.isdecimal() else (0, salt)
