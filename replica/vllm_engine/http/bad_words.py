"""Limits the total number of tokens in `bad_words` before the engine gets them.

vLLM limits the number of words when it tokenises them. Its engine on GPUs also limits the tokens of
all words together, and crashes at a request with more.
"""

from typing import Any

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

vllm_update_from_tokenizer = SamplingParams.update_from_tokenizer


def install() -> None:
    """Check the number of tokens in this process, as soon as vLLM has tokenised the words."""
    SamplingParams.update_from_tokenizer = _update_from_tokenizer


def _update_from_tokenizer(self: SamplingParams, tokenizer: Any) -> None:
    vllm_update_from_tokenizer(self, tokenizer)
    tokens = sum(map(len, self.bad_words_token_ids or ()))
    max_tokens = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    if tokens > max_tokens:
        raise VLLMValidationError(
            f"bad_words has {tokens} tokens in all; send fewer or shorter words, with at most "
            f"{max_tokens} tokens together",
            parameter="bad_words",
        )
