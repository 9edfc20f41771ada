"""Rejects requests with sampling parameters that vLLM accepts, but cannot run well."""

from typing import Any

from vllm import envs
from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

# Maximum number of log-probabilities of a prompt. The event loop handles all of them without a
# pause, and each takes 6 us of CPU time.
MAX_PROMPT_LOGPROBS = 131_072

vllm_update_from_tokenizer = SamplingParams.update_from_tokenizer


def check_prompt_logprobs(params: SamplingParams, tokens: int) -> None:
    """Reject a request with too many log-probabilities of the prompt."""
    if params.prompt_logprobs is None:
        return
    values = tokens * (params.prompt_logprobs + 1)
    if values > MAX_PROMPT_LOGPROBS:
        raise VLLMValidationError(
            f"this request needs {values} log-probabilities of the prompt: prompt_logprobs (with "
            f"echo: logprobs) plus one, times {tokens} tokens. The limit is "
            f"{MAX_PROMPT_LOGPROBS}; lower prompt_logprobs, or send a shorter prompt",
            parameter="prompt_logprobs",
        )


def check_tokens_fit_grammar(output: RequestOutput, params: SamplingParams) -> None:
    """Reject a request if its other fields exclude all tokens that its grammar allows.

    The engine ends such a request with the finish reason "error", which does not show the cause.
    """
    limits = {
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words,
        "logit_bias": params.logit_bias,
    }
    names = [name for name, value in limits.items() if value]
    if not names or params.structured_outputs is None:
        return
    if any(choice.finish_reason == "error" for choice in output.outputs):
        raise VLLMValidationError(
            f"{' and '.join(names)}: the allowed tokens do not fit the schema or grammar of the "
            "answer; allow more tokens, or leave out one of these fields",
            parameter=names[0],
        )


def check_takes_tokens(config: ModelConfig) -> None:
    """Raise a ValueError if the model needs more than a prompt of token ids."""
    if config.is_encoder_decoder:
        raise ValueError(
            "the model has an encoder, so it needs a recording; it takes no prompt of token ids"
        )


def update_from_tokenizer(self: SamplingParams, tokenizer: Any) -> None:
    """Tokenise bad_words as vLLM does, and check the number of tokens of all words together.

    On GPUs, vLLM's engine crashes at a request with more of them. Before the engine, vLLM only
    checks the number of words.
    """
    vllm_update_from_tokenizer(self, tokenizer)
    tokens = sum(map(len, self.bad_words_token_ids or ()))
    max_tokens = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    if tokens > max_tokens:
        raise VLLMValidationError(
            f"the words in bad_words have {tokens} tokens together, but the limit is {max_tokens}; "
            "send fewer or shorter words",
            parameter="bad_words",
        )
