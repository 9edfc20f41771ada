"""Batches of chats: they run at the same time, and the client gets one response."""

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
from fastapi import Response

from kvroute.router.api.fair_lock import run_all
from kvroute.router.dispatch.batch import merge_bodies
from kvroute.router.dispatch.relay import SHOWN_REPLICAS


async def run_together(chats: Iterable[Coroutine[Any, Any, Response]], *, id_: str) -> Response:
    """Run all chats at once, and return their responses as one.

    If a chat gets an error, return the first error instead. All chats are cancelled when one of
    them raises an exception, or when the client disconnects.

    Args:
        chats: each returns the response to one chat.
        id_: id of the request; it becomes a part of the response's id.
    """
    responses = await run_all(chats)
    for response in responses:
        if response.status_code != 200:
            return response
    return await _combine(responses, id_)


async def _combine(responses: Sequence[Response], id_: str) -> Response:
    bodies = [bytes(response.body) for response in responses]
    body = {**await merge_bodies(bodies, n=1), "id": f"chatcmpl-{id_}"}
    headers = _combined_headers([response.headers for response in responses])
    return Response(msgspec.json.encode(body), headers=headers, media_type="application/json")


def _combined_headers(responses: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Combine headers that `relay.placement_headers` made, as if one call had all prompts.

    Args:
        responses: the headers of the response to each chat.
    """
    replicas = dict.fromkeys(headers["x-kvroute-replica"] for headers in responses)
    longest = max(responses, key=lambda headers: float(headers["x-kvroute-queued-s"]))
    tokens = sum(int(headers["x-kvroute-expected-tokens"]) for headers in responses)
    return {
        "x-kvroute-replica": ",".join(islice(replicas, SHOWN_REPLICAS)),
        "x-kvroute-expected-tokens": str(tokens),
        "x-kvroute-queued-s": longest["x-kvroute-queued-s"],
        "x-kvroute-queued-for": longest["x-kvroute-queued-for"],
    }
