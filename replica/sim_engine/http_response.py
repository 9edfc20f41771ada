"""Answers chats and completions in OpenAI's format with a simulated engine.

Requests to other routes, and fields that the engine does not support, are rejected.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from kvroute.blocks.variants import name_of
from kvroute.contract.generation import Chunk, Emit, GenerateRequest, client_id
from kvroute.contract.http_call import NO_RECORD, HttpCall, HttpPart, Rendered
from kvroute.replica.sim_engine.choice_output import ChoiceOutput
from kvroute.replica.sim_engine.sampling import (
    Chat,
    CommonBody,
    Completion,
    Sampling,
    UnsupportedRequestError,
    check,
    read,
)
from kvroute.replica.sim_engine.shapes import JSON, ChatReply, CompletionReply, SimulatedResponse

ROUTES: dict[str, tuple[type[CommonBody], type[SimulatedResponse]]] = {
    "/v1/chat/completions": (Chat, ChatReply),
    "/v1/completions": (Completion, CompletionReply),
}

Outputs = Callable[[GenerateRequest, Sampling], AsyncGenerator[ChoiceOutput, None]]


async def respond(
    request: GenerateRequest,
    call: HttpCall,
    outputs_of: Outputs,
    emit: Emit,
    *,
    model: str,
    max_model_len: int,
) -> None:
    """Emit the response to a call, one chunk for each output.

    Args:
        request: The request.
        call: The HTTP call of the request.
        outputs_of: Yields the outputs. If another engine has begun the response, the first outputs
            are that engine's, and the call's `deltas` has an item for each of them.
        emit: Receives the chunks.
        model: The model's name in the response.
        max_model_len: The maximum number of tokens of prompt and answer.
    """
    try:
        kind, shape = _route(call)
        prompt_tokens = len(request.prompt_ids)
        sampling = read(kind, call.body, prompt_tokens=prompt_tokens, max_model_len=max_model_len)
    except UnsupportedRequestError as error:
        emit(Chunk((), 0, is_last=True, http=_part(error)))
        return
    reply = shape(
        sampling,
        id_=client_id(request.request_id),
        model=name_of(request.variant) or model,
        created=call.created,
        cached_tokens=call.cached_tokens if call.deltas else None,
        prompt_tokens=prompt_tokens,
    )
    repeated = len(call.deltas)  # number of outputs that the client has received already
    # Whether status and content type are still to be sent. If a stream goes on after a lost
    # replica, that replica has sent them.
    needs_head = not (repeated and sampling.is_stream)
    async with aclosing(outputs_of(request, sampling)) as outputs:
        async for output in outputs:
            data = reply.add(output)
            if repeated:
                repeated -= 1
                continue
            if reply.is_complete:
                data += reply.end()
            has_head = needs_head and (sampling.is_stream or reply.is_complete)
            needs_head = needs_head and not has_head
            part = HttpPart(
                data,
                200 if has_head else 0,
                reply.content_type if has_head else "",
                (len(output.token_ids),),
                can_continue=sampling.can_continue,
            )
            emit(Chunk(output.token_ids, output.cached_tokens, reply.is_complete, part))


def rendered(call: HttpCall) -> Rendered:
    """Return an error: routers render all prompts that a simulated engine supports."""
    return Rendered(refusal=_part(_refusal(call)))


def _refusal(call: HttpCall) -> UnsupportedRequestError:
    try:
        kind, _ = _route(call)
        check(kind, call.body)
    except UnsupportedRequestError as error:
        return error
    if call.problem == NO_RECORD:
        return UnsupportedRequestError(f"{NO_RECORD}; try again", status=503, code="unavailable")
    param = "messages" if kind is Chat else "prompt"
    return UnsupportedRequestError(
        f"the simulated engine cannot render this body: {call.problem}", param
    )


def _route(call: HttpCall) -> tuple[type[CommonBody], type[SimulatedResponse]]:
    if call.path not in ROUTES:
        raise UnsupportedRequestError(
            f"POST {call.path}: the simulated engine does not have this route; to use it, start "
            "with --engine vllm",
            code="not_found",
            status=404,
        )
    return ROUTES[call.path]


def _part(error: UnsupportedRequestError) -> HttpPart:
    return HttpPart(error.body, error.status, JSON)
