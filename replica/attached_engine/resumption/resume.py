"""Prepares the request with which a server continues another server's answer."""

from collections.abc import Sequence
from http import HTTPStatus

from kvroute.contract.generation import Chunk, GenerateRequest, client_id
from kvroute.contract.http_call import HttpPart
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.replica.attached_engine.resumption.cut import find_cut
from kvroute.replica.attached_engine.resumption.plain_stream import PlainStream
from kvroute.replica.attached_engine.resumption.resumed_events import FirstPart, ResumedEvents
from kvroute.replica.attached_engine.server_client import ServerClient


class NoTextError(Exception):
    """A server does not tell the text of tokens."""


async def resumed_events(
    server: ServerClient,
    model: str,
    request: GenerateRequest,
    plain: PlainStream,
    *,
    context: int,
    block_size: int,
) -> ResumedEvents | None:
    """Return the reader of the events that continue an answer; None: the server cannot continue it.

    Args:
        server: The server that is to continue it.
        model: The name of the model, or of the adapter, at the server.
        request: The request, with the tokens of the answer so far.
        plain: The client's request in the form that can be continued.
        context: The most tokens of a prompt and its answer.
        block_size: The tokens of a block of the KV cache.

    Raises:
        ServerLostError: The server does not answer.
    """
    call = request.call
    assert call is not None, "only a client's stream is a plain stream"
    prompt, answered = request.prompt_ids.tolist(), request.answered_ids.tolist()

    async def detokenize(token_ids: Sequence[int]) -> str:
        question = {"model": model, "tokens": token_ids}
        reply = await server.post("/detokenize", question)
        try:
            text = reply.decoded().get("prompt")
        except (*DECODE_ERRORS, AttributeError):
            text = None
        if not isinstance(text, str):
            raise NoTextError(f"{server.url}/detokenize has answered with {reply.status}")
        return text

    try:
        cut = await find_cut(detokenize, plain, prompt, answered, call.text_chars)
    except NoTextError:
        cut = None
    if cut is None or plain.tokens_left(len(answered), len(prompt), context) < 1:
        return None
    first_part = FirstPart(
        plain,
        client_id(request.request_id),
        int(call.created),
        prompt,
        answered,
        call.cached_tokens,
        max(0, len(prompt) // block_size * block_size - call.cached_tokens),
        cut,
        context,
    )
    return ResumedEvents(first_part)


def refusal(cached_tokens: int) -> Chunk:
    """Return the only chunk of an answer that cannot be continued; the router tells the client."""
    part = HttpPart(b"{}", HTTPStatus.INTERNAL_SERVER_ERROR, "application/json")
    return Chunk((), cached_tokens, is_last=True, http=part)
