"""Words that an answer must not have are limited by their tokens before the engine gets them.

vLLM limits their number when it tokenises them. Its engine on GPUs also limits the tokens of all
words, and dies of a request with more.
"""

from typing import Any

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

_tokenise = SamplingParams.update_from_tokenizer


def install() -> None:
    """Check the tokens when vLLM has made them, in this process."""
    SamplingParams.update_from_tokenizer = _update_from_tokenizer


def _update_from_tokenizer(self: SamplingParams, tokenizer: Any) -> None:
    _tokenise(self, tokenizer)
    tokens = sum(map(len, self.bad_words_token_ids or ()))
    most = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    if tokens > most:
        raise VLLMValidationError(
            f"bad_words has {tokens} tokens; send words of {most} tokens at most",
            parameter="bad_words",
        )
