"""Edits and stores responses of the Responses API, so that later calls can continue them.

The edit adds the field previous_response_id, which replicas do not know.
"""

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.router.api.response_object import (
    encode,
    events_with_previous,
    last_response,
    members,
    with_previous,
)
from kvroute.router.serving.conversations import Expanded


async def stored(expanded: Expanded, response: Response) -> Response:
    """Return the response with the id of the previous response; store it if the client wants that.

    It is stored before its end is sent, so a client that has received all of it can continue the
    conversation at once.
    """
    if expanded.previous_id is None and expanded.store is None:
        return response
    if isinstance(response, StreamingResponse):
        return _StoredEvents(expanded, response)
    if response.status_code == 200:
        response.body = await _edited(expanded, bytes(response.body))
        response.headers["content-length"] = str(len(response.body))
    return response


async def _edited(expanded: Expanded, body: bytes) -> bytes:
    """Return the body of a response with the id of the previous response; store it if wanted."""
    try:
        response = members(body)
    except DECODE_ERRORS:  # the client gets the replica's bytes unchanged
        return body
    if expanded.previous_id is not None:
        response = with_previous(response, expanded.previous_id)
        body = encode(response)
    if expanded.store is not None:
        await expanded.store(response)
    return body


class _StoredEvents(Response):
    """A streamed response, which is edited and stored while it is sent.

    Each chunk that a replica sends consists of complete events.
    """

    def __init__(self, expanded: Expanded, stream: StreamingResponse) -> None:
        super().__init__(status_code=stream.status_code)
        self.raw_headers = stream.raw_headers  # the same list, so that headers added here are sent
        self._expanded = expanded
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_edited(message: Message) -> None:
            if body := message.get("body"):
                message = {**message, "body": await self._edited(body)}
            await send(message)

        await self._stream(scope, receive, send_edited)

    async def _edited(self, data: bytes) -> bytes:
        try:
            if self._expanded.previous_id is not None:
                data = events_with_previous(data, self._expanded.previous_id)
            response = None if self._expanded.store is None else last_response(data)
        except (*DECODE_ERRORS, LookupError):
            return data
        if response is not None and self._expanded.store is not None:
            await self._expanded.store(response)
        return data
