"""The chats of a batch run at the same time, and the client gets one response."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
from fastapi import Response

from kvroute.router.dispatch.batch import one_body
from kvroute.router.dispatch.relay import SHOWN_REPLICAS
from kvroute.router.placement.receipts import RECEIPTS


async def answered_together(
    chats: Iterable[Coroutine[Any, Any, Response]], *, id_: str
) -> Response:
    """Return the responses to all chats as one, or the first that is an error.

    The other chats end when one raises an exception, or when the client leaves.

    Args:
        id_: of the request, which the response's id has.
    """
    tasks: list[asyncio.Task[Response]] = []
    try:
        for chat in chats:
            tasks.append(asyncio.create_task(chat))
            await asyncio.sleep(0)  # the event loop does what else is due before the next one
        responses = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for response in responses:
        if response.status_code != 200:
            return response
    return _one(responses, id_)


def _one(responses: Sequence[Response], id_: str) -> Response:
    bodies = [msgspec.json.decode(response.body) for response in responses]
    body = {**one_body(bodies, n=1), "id": f"chatcmpl-{id_}"}
    if RECEIPTS in body:
        body[RECEIPTS] = [receipt for body in bodies for receipt in body[RECEIPTS]]
    headers = _placement([response.headers for response in responses])
    return Response(msgspec.json.encode(body), headers=headers, media_type="application/json")


def _placement(each: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return what placement_headers makes of several prompts: here of one response to each."""
    replicas = dict.fromkeys(headers["x-kvroute-replica"] for headers in each)
    longest = max(each, key=lambda headers: float(headers["x-kvroute-queued-s"]))
    tokens = sum(int(headers["x-kvroute-expected-tokens"]) for headers in each)
    return {
        "x-kvroute-replica": ",".join(islice(replicas, SHOWN_REPLICAS)),
        "x-kvroute-expected-tokens": str(tokens),
        "x-kvroute-queued-s": longest["x-kvroute-queued-s"],
        "x-kvroute-queued-for": longest["x-kvroute-queued-for"],
    }
