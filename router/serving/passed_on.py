"""Passes calls on to any replica: calls that its HTTP application answers without the KV cache."""

import msgspec
from fastapi import Response
from fastapi.responses import JSONResponse

from kvroute.contract.http_call import decode_part, encode_call
from kvroute.router.api.calls import COUNT_TOKENS, Call
from kvroute.router.api.errors import invalid
from kvroute.router.dispatch.relay import whole_response
from kvroute.router.serving.assembly import Parts
from kvroute.router.serving.expansion import named_prefix
from kvroute.router.serving.rendering import Renderer, http_call
from kvroute.store.named_prefix import Prefix

WHOLE_S = 600.0  # seconds that a replica may take to answer such a call, which may have many texts


async def passed_on(call: Call, request_id: str, parts: Parts, renderer: Renderer) -> Response:
    """Return the response of any replica.

    If the call counts the tokens of a prompt with a named prefix, the router answers it instead.

    Raises:
        ApiError: no replica answers, or there is no such prefix.
        RefusedCallError: a replica refuses the body.
    """
    call = await parts.tokenizer.escaped(call)
    generating = call.as_generating()
    if generating is not None and (prefix := await named_prefix(call, parts.prefixes.catalogue)):
        return await _counted(call, generating, prefix, parts, renderer)
    http = msgspec.structs.replace(
        http_call(call, call.raw), request_id=request_id, namespace=call.cache_salt
    )
    answer = await parts.questions.ask("http", encode_call(http), within_s=WHOLE_S)
    return whole_response(decode_part(answer), path=call.path)


async def _counted(
    call: Call, generating: Call, prefix: Prefix, parts: Parts, renderer: Renderer
) -> Response:
    """Return the response to a call that counts the tokens of a prompt with a named prefix."""
    prompts = (await renderer.render(generating, prefix)).token_ids
    if len(prompts) != 1:
        raise invalid("prompt", f"prompt has {len(prompts)} texts; expected one")
    (ids,) = prompts
    if call.path == COUNT_TOKENS:
        context = {"original_input_tokens": len(ids)}
        return JSONResponse({"input_tokens": len(ids), "context_management": context})
    found = {"count": len(ids), "max_model_len": parts.max_model_len(), "tokens": ids.tolist()}
    texts = None
    if call.body.get("return_token_strs") is True:
        texts = parts.tokenizer.token_strings(ids)
    return JSONResponse({**found, "token_strs": texts})
