"""A response that another engine began goes on as if this engine had generated all of it.

The tokens that were answered become the end of the prompt. This is vLLM's private API in part;
tests/slow/engines/test_engine.py checks what it relies on.
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

CONTEXT_TOKENS = 4  # preceding tokens that vLLM needs to decode a token's text for logprobs


def can_continue(params: SamplingParams) -> bool:
    """Whether another engine can go on exactly where the first one failed.

    It cannot with several choices, of which a prompt can hold only one; with a presence penalty,
    which applies once however often a token occurs; with a budget for thinking, of which it does
    not know the rest; and where the response ends with numbers of the tokens answered before.
    """
    is_whole = params.output_kind is RequestOutputKind.FINAL_ONLY
    return (
        params.n == 1
        and not params.presence_penalty
        and params.thinking_token_budget is None
        and params.prompt_logprobs is None
        and not (is_whole and params.logprobs is not None)
        and params.output_kind is not RequestOutputKind.CUMULATIVE  # beam search
    )


def rest(params: SamplingParams, answered: Sequence[int]) -> SamplingParams:
    """The parameters for what is left of the response. Changes and returns `params`."""
    params.max_tokens = (params.max_tokens or 0) - len(answered)
    params.min_tokens = max(0, params.min_tokens - len(answered))
    if params.seed is not None:  # a generator cannot skip ahead, and must not repeat its numbers
        params.seed ^= len(answered)
    if params.frequency_penalty:  # vLLM's penalty counts only its own output
        bias = dict(params.logit_bias or {})
        for token_id, count in Counter(answered).items():
            bias[token_id] = bias.get(token_id, 0.0) - params.frequency_penalty * count
        params.logit_bias = bias
    params.extra_args = {**(params.extra_args or {}), ANSWERED: len(answered)}
    return params


def repeated(
    answered: Sequence[int],
    deltas: Sequence[int],
    prompt: Mapping[str, Any],
    params: SamplingParams,
    request_id: str,
    tokenizer: Any,
) -> Iterator[RequestOutput]:
    """Yield the outputs of the engine that answered these tokens.

    Args:
        answered: all tokens of these outputs.
        deltas: how many tokens each output has.
        prompt: vLLM's, as it came from its renderer.
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
    """Return an entry for each token, without its probability; None if none are wanted.

    vLLM's application counts the characters of the tokens' texts, where a token may be a part of a
    character.
    """
    if processor.num_logprobs is None:
        return None
    for id_ in ids:
        sampled = LogprobsLists(np.array([[id_]]), np.zeros((1, 1)), np.ones(1, dtype=int))
        processor._update_sample_logprobs(sampled)
    return (processor.logprobs or [])[-len(ids) :] if ids else []


class ContinuingLLM(AsyncLLM):
    """AsyncLLM for requests whose extra_args have ANSWERED."""

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
    """Treats the request's last `answered` prompt tokens as output that was delivered."""
    ids = request.prompt_token_ids
    prompt, delivered = ids[:-answered], ids[-answered:]
    detokenizer = IncrementalDetokenizer.from_new_request(
        tokenizer, msgspec.structs.replace(request, prompt_token_ids=prompt)
    )
    detokenizer.min_tokens += answered  # stop strings are ignored before this many tokens
    detokenizer.update(delivered, stop_terminated=False)
    detokenizer.get_next_output_text(finished=False, delta=True)
    state.detokenizer = detokenizer
    state.sent_tokens_offset = answered
    if state.logprobs_processor.logprobs is not None:
        context = delivered[-CONTEXT_TOKENS:]
        state.logprobs_processor.logprobs += [{id_: Logprob(0.0)} for id_ in context]
