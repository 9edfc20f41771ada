"""Continues a response that another engine began, as if this engine had generated all of it.

The tokens that the other engine has generated (`answered`) are appended to the prompt. This module
uses private API of vLLM. tests/slow/engines/test_engine.py checks the behaviour that it relies on.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.outputs import LogprobsLists

from kvroute.replica.vllm_engine.grammar.backends import ANSWERED

CONTEXT_TOKENS = 4  # number of preceding tokens that vLLM uses to decode a token for logprobs


def can_continue(params: SamplingParams) -> bool:
    """Return whether a second engine can continue the response if the first engine fails.

    It cannot in these cases:
    - The request has several choices: a prompt can hold the tokens of only one choice.
    - The request uses beam search, whose outputs are cumulative.
    - The request has a presence penalty. For the first engine's tokens, a logit bias can replace a
      frequency penalty. But a presence penalty applies only once to each token: if the token occurs
      again, vLLM would apply both the bias and the penalty.
    - The request has a budget for reasoning tokens: the second engine does not know how much of it
      is left.
    - The response contains log-probabilities of the prompt, or it is sent in one piece and contains
      log-probabilities of its tokens. The second engine does not have those from the first one.
    """
    is_final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
    return (
        params.n == 1
        and not params.presence_penalty
        and params.thinking_token_budget is None
        and params.prompt_logprobs is None
        and not (is_final_only and params.logprobs is not None)
        and params.output_kind is not RequestOutputKind.CUMULATIVE
    )


def prompt_ids(prompt: Mapping[str, Any]) -> Sequence[int] | None:
    """Return the token ids of a prompt; if the model has an encoder, those of the decoder's part.

    None: vLLM has not rendered the prompt, or it consists of embeddings.
    """
    ids: Sequence[int] | None = prompt.get("decoder_prompt", prompt).get("prompt_token_ids")
    return ids


def remaining_params(params: SamplingParams, answered: Sequence[int]) -> SamplingParams:
    """Change `params` to the parameters for the tokens after `answered`, and return them.

    Raises:
        ValueError: No token is left. vLLM checks new parameters only. In the engine's process, an
            invalid limit would end the thread that receives requests.
    """
    params.max_tokens = (params.max_tokens or 0) - len(answered)
    if params.max_tokens < 1:
        raise ValueError(f"the answer has all of its {len(answered)} tokens already")
    params.min_tokens = max(0, params.min_tokens - len(answered))
    if params.seed is not None:
        # With the same seed, the generator would draw the first engine's random numbers again, and
        # it cannot skip them. So it gets another seed.
        params.seed ^= len(answered)
    if params.frequency_penalty:
        # vLLM counts only tokens that this engine generates. A logit bias has the same effect for
        # the first engine's tokens.
        bias = dict(params.logit_bias or {})
        for token_id, count in Counter(answered).items():
            bias[token_id] = bias.get(token_id, 0.0) - params.frequency_penalty * count
        params.logit_bias = bias
    params.extra_args = {**(params.extra_args or {}), ANSWERED: len(answered)}
    return params


def repeated_outputs(
    answered: Sequence[int],
    deltas: Sequence[int],
    prompt: Mapping[str, Any],
    params: SamplingParams,
    request_id: str,
    tokenizer: Any,
) -> Iterator[RequestOutput]:
    """Yield the outputs of the first engine again, made from the tokens that it generated.

    Args:
        answered: The tokens that the first engine generated.
        deltas: The number of tokens in each of the first engine's outputs.
        prompt: The prompt, as vLLM's renderer made it.
        params: The request's parameters.
        request_id: The request's id.
        tokenizer: The model's tokenizer.
    """
    prompt_ids, text_of_prompt = prompt["prompt_token_ids"], prompt.get("prompt")
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt_ids,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    logprobs = LogprobsProcessor.from_new_request(tokenizer, request)
    end = 0
    for tokens in deltas:
        ids = list(answered[end : end + tokens])
        end += tokens
        detokenizer.update(ids, stop_terminated=False)
        text = detokenizer.get_next_output_text(finished=False, delta=True)
        choice = CompletionOutput(0, text, ids, None, _repeated_logprobs(logprobs, ids))
        yield RequestOutput(request_id, text_of_prompt, prompt_ids, None, [choice], finished=False)


def _repeated_logprobs(processor: LogprobsProcessor, ids: Sequence[int]) -> Any:
    """Return entries with log-probability 0 for these tokens; None if none are requested.

    The client has already received the real numbers. But vLLM's application needs the tokens' texts
    in the entries: from their lengths, it computes the text offsets of later tokens. `processor`
    decodes the texts. It has seen the earlier tokens, which matters if a token is only a part of a
    character.
    """
    if processor.num_logprobs is None:
        return None
    for id_ in ids:
        sampled = LogprobsLists(np.array([[id_]]), np.zeros((1, 1)), np.ones(1, dtype=int))
        processor._update_sample_logprobs(sampled)
    return (processor.logprobs or [])[-len(ids) :] if ids else []


class ContinuingLLM(AsyncLLM):
    """AsyncLLM that can also continue a response of another engine.

    It does so if the request's extra_args contain ANSWERED, the number of tokens that the other
    engine has generated.
    """

    async def _add_request(self, request: EngineCoreRequest, *args: Any) -> None:
        params = request.sampling_params
        answered = ((params and params.extra_args) or {}).get(ANSWERED)
        if answered is None:
            await super()._add_request(request, *args)
            return
        self.output_processor.add_request(request, *args)
        state = self.output_processor.request_states[request.request_id]
        _continue(state, request, answered, self.output_processor.tokenizer)
        await self.engine_core.add_request_async(request)


def _continue(
    state: RequestState, request: EngineCoreRequest, answered: int, tokenizer: Any
) -> None:
    """Treat the last `answered` tokens of the prompt as output that the client already has."""
    ids = request.prompt_token_ids
    prompt, delivered = ids[:-answered], ids[-answered:]
    detokenizer = IncrementalDetokenizer.from_new_request(
        tokenizer, msgspec.structs.replace(request, prompt_token_ids=prompt)
    )
    # Stop strings are ignored until the output has `min_tokens` tokens. The output includes the
    # first engine's tokens, but the request's value counts only the tokens still to be generated.
    detokenizer.min_tokens += answered
    detokenizer.update(delivered, stop_terminated=False)
    detokenizer.get_next_output_text(finished=False, delta=True)
    state.detokenizer = detokenizer
    state.sent_tokens_offset = answered
    if state.logprobs_processor.logprobs is not None:
        context = delivered[-CONTEXT_TOKENS:]
        state.logprobs_processor.logprobs += [{id_: Logprob(0.0)} for id_ in context]
