"""Responding: makes the response to the client out of what replicas generate for a call."""

from collections.abc import Sequence
from functools import partial

from fastapi import Response
from msgspec import Raw

from kvroute.router.api.calls import MESSAGES, RESPONSES, Call
from kvroute.router.api.errors import DONE, event
from kvroute.router.api.fair_lock import one_by_one
from kvroute.router.api.response_object import encode, members
from kvroute.router.conversations.continuing import Expanded
from kvroute.router.conversations.storing import stored
from kvroute.router.dispatch.batch import batch_response
from kvroute.router.dispatch.generation import Generation
from kvroute.router.dispatch.relay import placement_headers, relay_response
from kvroute.router.dispatch.replica_errors import replica_error
from kvroute.router.placement.receipts import RECEIPTS

NAMED_EVENTS = (RESPONSES, MESSAGES)  # routes whose events in streams have a name and a type


async def respond(
    expanded: Expanded, generations: Sequence[Generation], *, policy: str
) -> Response:
    """Return the response to a call, and store it if the call wants that. See `written`."""
    return await stored(expanded, await written(expanded.call, generations, policy=policy))


async def written(call: Call, generations: Sequence[Generation], *, policy: str) -> Response:
    """Return the response to a call, as its replicas write it.

    Args:
        generations: one for each prompt of the call; each has received its first chunk.
        policy: the routing policy. Receipts, which explain the placement of each prompt, name it.

    Raises:
        ApiError: no replica can continue the response.
    """
    ending = _unchanged  # edits the last bytes of the response
    if call.wants_receipts:
        ending = partial(_with_receipts, call.path, generations, policy)
    headers, failed = placement_headers(generations), partial(event, path=call.path)
    refused = partial(replica_error, path=call.path)
    if len(generations) == 1:
        return await relay_response(
            generations[0], headers, ending=ending, failed=failed, refused=refused
        )
    return await batch_response(
        generations, headers, n=call.n, ending=ending, failed=failed, refused=refused
    )


async def _unchanged(data: bytes) -> bytes:
    return data


async def _with_receipts(
    path: str, generations: Sequence[Generation], policy: str, data: bytes
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
