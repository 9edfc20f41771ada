"""Requests to an engine's HTTP application, as routers send them."""

import json
import re
from contextlib import aclosing

import numpy as np

from kvroute.contract.generation import NO_TOKENS, Chunk, GenerateRequest, TokenIds
from kvroute.contract.http_call import HttpCall
from tests.support.answers import data_of, status_of
from tests.support.bodies import Body
from tests.support.chunks import streamed
from tests.support.engines import Running, rest_of

CREATED = 1_700_000_000.25


def request_of(path: str, body: Body | bytes, ids: TokenIds = NO_TOKENS) -> GenerateRequest:
    """Return a request. Without token ids, the replica renders the prompt."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    call = HttpCall(path, raw, CREATED, is_rendered=len(ids) > 0)
    return GenerateRequest("id-1", ids, call=call)


async def prompt_of(running: Running, path: str, body: Body) -> TokenIds:
    rendered = await running.engine.render(
        HttpCall(path, json.dumps(body).encode(), CREATED, is_rendered=False)
    )
    return np.frombuffer(rendered.token_ids, "<u4")


async def chunks_of(running: Running, request: GenerateRequest, most: int = 1000) -> list[Chunk]:
    chunks = []
    async with aclosing(streamed(running.engine.generate, request)) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == most:
                break
    return chunks


async def goes_on(
    running: Running, request: GenerateRequest, undisturbed: list[Chunk], *, cut: int
) -> bool:
    """Check that a response continues correctly if it is cut after `cut` chunks.

    Returns False if the response cannot be continued there. In this case, the client must not have
    received anything yet.
    """
    begun = await chunks_of(running, request, most=cut)
    if not can_continue(begun):
        assert not data_of(begun)
        return False
    rest = await chunks_of(running, rest_of(request, begun))
    assert status_of(begun + rest) == 200
    assert without_digits(data_of(begun + rest)) == without_digits(data_of(undisturbed))
    return True


def can_continue(chunks: list[Chunk]) -> bool:
    return all(chunk.http.can_continue for chunk in chunks if chunk.http)


def without_digits(data: bytes) -> bytes:
    """Return a response without dates, and without the last digits of log-probabilities.

    These digits depend on how much of the prompt was cached.
    """
    data = re.sub(rb'"completed_at":\s?\d+', b'"completed_at":0', data)
    return re.sub(rb"-?\d+\.\d{4,}(e-\d+)?", lambda match: b"%.2f" % float(match[0]), data)
