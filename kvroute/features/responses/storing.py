"""Edits and stores responses of the Responses API, so that later calls can continue them.

The edit adds the id of the previous response or of the conversation, which replicas do not know.
"""

from collections.abc import Awaitable, Callable, Sequence

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.responses.response_items import events_with, last_response
from kvroute.router.api.json_members import Members, encode, members

Keep = Callable[[Members], Awaitable[None]]  # stores a response, or its items


class Storing:
    """What happens to the response to one call before the client gets it.

    Args:
        continued: members that response objects get: the id of the previous response or of the
            conversation.
        keepers: each of these stores the response, or its items.
    """

    def __init__(self, continued: Members, keepers: Sequence[Keep]) -> None:
        self._continued = continued
        self._keepers = keepers

    async def finish(self, response: Response) -> Response:
        """Return the response with what it continues; store it if the client wants that.

        It is stored before its end is sent, so a client that has received all of it can continue
        the conversation at once.
        """
        if isinstance(response, StreamingResponse):
            return _StoredEvents(self, response)
        if response.status_code == 200:
            response.body = await self._finished(bytes(response.body))
            response.headers["content-length"] = str(len(response.body))
        return response

    async def _finished(self, body: bytes) -> bytes:
        """Return the body of a response with what it continues; store it if wanted."""
        try:
            response = members(body)
        except DECODE_ERRORS:  # the client gets the replica's bytes unchanged
            return body
        if self._continued:
            response |= self._continued
            body = encode(response)
        await self._keep(response)
        return body

    async def events(self, data: bytes) -> bytes:
        """Return complete events of a stream with what it continues; store the response."""
        try:
            if self._continued:
                data = events_with(self._continued, data)
            response = last_response(data) if self._keepers else None
        except (*DECODE_ERRORS, LookupError):
            return data
        if response is not None:
            await self._keep(response)
        return data

    async def _keep(self, response: Members) -> None:
        for keep in self._keepers:
            await keep(response)


class _StoredEvents(Response):
    """A streamed response, which is edited and stored while it is sent.

    Each chunk that a replica sends consists of complete events.
    """

    def __init__(self, storing: Storing, stream: StreamingResponse) -> None:
        super().__init__(status_code=stream.status_code)
        self.raw_headers = stream.raw_headers  # the same list, so that headers added here are sent
        self._storing = storing
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_edited(message: Message) -> None:
            if body := message.get("body"):
                message = {**message, "body": await self._storing.events(body)}
            await send(message)

        await self._stream(scope, receive, send_edited)
