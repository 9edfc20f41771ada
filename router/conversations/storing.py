"""Edits and stores responses of the Responses API, so that later calls can continue them.

The edit adds the id of the previous response or of the conversation, which replicas do not know.
"""

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.router.api.response_object import (
    encode,
    events_with,
    last_response,
    members,
)
from kvroute.router.conversations.continuing import Expanded


async def stored(expanded: Expanded, response: Response) -> Response:
    """Return the response with what it continues; store it if the client wants that.

    It is stored before its end is sent, so a client that has received all of it can continue the
    conversation at once.
    """
    if not expanded.continued and not expanded.keepers:
        return response
    if isinstance(response, StreamingResponse):
        return _StoredEvents(expanded, response)
    if response.status_code == 200:
        response.body = await _edited(expanded, bytes(response.body))
        response.headers["content-length"] = str(len(response.body))
    return response


async def _edited(expanded: Expanded, body: bytes) -> bytes:
    """Return the body of a response with what it continues; store it if wanted."""
    try:
        response = members(body)
    except DECODE_ERRORS:  # the client gets the replica's bytes unchanged
        return body
    if expanded.continued:
        response |= expanded.continued
        body = encode(response)
    for keep in expanded.keepers:
        await keep(response)
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
            if self._expanded.continued:
                data = events_with(self._expanded.continued, data)
            response = last_response(data) if self._expanded.keepers else None
        except (*DECODE_ERRORS, LookupError):
            return data
        if response is not None:
            for keep in self._expanded.keepers:
                await keep(response)
        return data
