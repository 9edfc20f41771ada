"""Checks the total number of tokens of `bad_words` before the engine gets them.

On GPUs, vLLM's engine has a limit on the tokens of all words together, and crashes at a request
that exceeds the limit. Before the engine, vLLM only checks the number of words.
"""

from typing import Any

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

vllm_update_from_tokenizer = SamplingParams.update_from_tokenizer


def update_from_tokenizer(self: SamplingParams, tokenizer: Any) -> None:
    """Tokenise the words as vLLM does, and check the number of tokens."""
    vllm_update_from_tokenizer(self, tokenizer)
    tokens = sum(map(len, self.bad_words_token_ids or ()))
    max_tokens = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    if tokens > max_tokens:
        raise VLLMValidationError(
            f"the words in bad_words have {tokens} tokens together, but the limit is {max_tokens}; "
            "send fewer or shorter words",
            parameter="bad_words",
        )
