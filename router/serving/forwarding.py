"""Forwards calls without a use for the KV cache to the HTTP application of any replica."""

import msgspec
from fastapi import Response
from fastapi.responses import JSONResponse

from kvroute.contract.http_call import decode_part, encode_call
from kvroute.router.api.calls import COUNT_TOKENS, INPUT_TOKENS, Call
from kvroute.router.api.errors import invalid
from kvroute.router.dispatch.relay import complete_response
from kvroute.router.history.readable import readable
from kvroute.router.serving.assembly import Parts
from kvroute.router.serving.rendering import Renderer, http_call

TIMEOUT_S = 600.0  # seconds for a replica to answer; a call may have many texts to embed


async def forward(call: Call, request_id: str, parts: Parts, renderer: Renderer) -> Response:
    """Forward a call to any replica, and return the response.

    The router itself counts tokens for the Responses API and for prompts that begin with a
    feature's own tokens (`Opening`): replicas know neither.

    Raises:
        ApiError: no replica answers, or the call names an unknown opening or stored item.
        RefusedCallError: a replica refuses the body.
    """
    generating = call.as_generating()
    is_expanded = call.path == INPUT_TOKENS or await parts.opening(call) is not None
    if generating is not None and is_expanded:
        return await _count_tokens(call, generating, parts, renderer)
    call = await parts.tokenizer.escaped(readable(call))
    http = msgspec.structs.replace(
        http_call(call, call.raw), request_id=request_id, namespace=call.cache_salt
    )
    answer = await parts.questions.ask("http", encode_call(http), within_s=TIMEOUT_S)
    return complete_response(decode_part(answer), path=call.path)


async def _count_tokens(call: Call, generating: Call, parts: Parts, renderer: Renderer) -> Response:
    """Return the response to a call that counts the tokens of a prompt.

    Args:
        call: the call that counts.
        generating: the call that would generate an answer to the same prompt.
    """
    expanded = await parts.expand(generating)
    prompts = (await renderer.render(expanded.call, expanded.opening)).token_ids
    if len(prompts) != 1:
        raise invalid("prompt", f"prompt has {len(prompts)} texts; expected one")
    (ids,) = prompts
    if call.path == INPUT_TOKENS:
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(ids)})
    if call.path == COUNT_TOKENS:
        context = {"original_input_tokens": len(ids)}
        return JSONResponse({"input_tokens": len(ids), "context_management": context})
    counts = {"count": len(ids), "max_model_len": parts.max_model_len(), "tokens": ids.tolist()}
    texts = None
    if call.body.get("return_token_strs") is True:
        texts = parts.tokenizer.token_strings(ids)
    return JSONResponse({**counts, "token_strs": texts})
