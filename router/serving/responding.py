"""Responding: makes the response to the client out of what replicas generate for a call."""

from collections.abc import Iterable, Sequence
from functools import partial

from fastapi import Response
from msgspec import Raw

from kvroute.router.api.calls import MESSAGES, RESPONSES, Call
from kvroute.router.api.errors import DONE
from kvroute.router.api.fair_lock import one_by_one
from kvroute.router.api.json_members import encode, members
from kvroute.router.dispatch.batch import batch_response
from kvroute.router.dispatch.generation import Generation, StartPrompt
from kvroute.router.dispatch.relay import relay_response
from kvroute.router.placement.receipts import RECEIPTS

NAMED_EVENTS = (RESPONSES, MESSAGES)  # routes whose events in streams have a name and a type


async def written(
    call: Call, starts: Iterable[StartPrompt], *, prompts: int, policy: str
) -> Response:
    """Start the prompts of a call, and return the response as its replicas write it.

    Args:
        starts: each starts one prompt of the call.
        prompts: number of prompts.
        policy: the routing policy. Receipts, which explain the placement of each prompt, name it.

    Raises:
        ApiError: a prompt cannot run, or no replica can continue the response.
    """
    ending = _unchanged  # edits the last bytes of the response
    if call.wants_receipts:
        ending = partial(_with_receipts, call.path, policy)
    if prompts > 1:
        return await batch_response(
            starts, prompts=prompts, n=call.n, path=call.path, ending=ending
        )
    (start,) = starts
    return await relay_response(await start(), path=call.path, ending=ending)


async def _unchanged(_: Sequence[Generation], data: bytes) -> bytes:
    return data


async def _with_receipts(
    path: str, policy: str, generations: Sequence[Generation], data: bytes
) -> bytes:
    """Return the last bytes of a response with the receipts, as a field of the body or an event."""
    each = [Raw(encode(each.receipt(policy))) async for each in one_by_one(generations)]
    receipts = {RECEIPTS: each}
    if data.startswith(b"{"):
        return encode({**members(data), **receipts})
    if path in NAMED_EVENTS:
        event = b"event: kvroute.receipts\ndata: " + encode(
            {"type": "kvroute.receipts", **receipts}
        )
    else:
        event = b"data: " + encode({"object": "kvroute.receipts", "choices": [], **receipts})
    end = DONE if data.endswith(DONE) else b""
    return b"".join((data.removesuffix(DONE), event, b"\n\n", end))
