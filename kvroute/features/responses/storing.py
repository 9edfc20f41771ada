"""Edits and stores responses of the Responses API, so that later calls can continue them.

The edit adds the id of the previous response or of the conversation, which replicas do not know.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.responses.response_items import events_with, last_response
from kvroute.router.api.json_members import Members, encode, members

Keep = Callable[[Members], Awaitable[None]]  # stores a response, or its items


class ResponseEdit(ABC):
    """Changes the response to one call before the client gets it.

    Both methods may raise DECODE_ERRORS or LookupError. The client then gets the bytes unchanged.
    """

    @abstractmethod
    async def whole(self, response: Members) -> Members:
        """Return the response object for the client; the same one if nothing changes."""

    @abstractmethod
    async def events(self, data: bytes) -> bytes:
        """Return events for the client instead of some complete events of a stream."""

    async def finish(self, response: Response) -> Response:
        """Return the response that the client gets."""
        if isinstance(response, StreamingResponse):
            return EditedEvents(self, response)
        if response.status_code == 200:
            with suppress(*DECODE_ERRORS, LookupError):
                given = members(bytes(response.body))
                if (changed := await self.whole(given)) is not given:
                    response.body = encode(changed)
                    response.headers["content-length"] = str(len(response.body))
        return response


class Storing(ResponseEdit):
    """Stores the response to one call, and adds what the call continues.

    The response is stored before its end is sent, so a client that has received all of it can
    continue the conversation at once.

    Args:
        continued: members that response objects get: the id of the previous response or of the
            conversation.
        keepers: each of these stores the response, or its items.
    """

    def __init__(self, continued: Members, keepers: Sequence[Keep]) -> None:
        self._continued = continued
        self._keepers = keepers

    async def whole(self, response: Members) -> Members:
        if self._continued:
            response = response | self._continued
        await self._keep(response)
        return response

    async def events(self, data: bytes) -> bytes:
        if self._continued:
            data = events_with(self._continued, data)
        with suppress(*DECODE_ERRORS, LookupError):
            response = last_response(data) if self._keepers else None
            if response is not None:
                await self._keep(response)
        return data

    async def _keep(self, response: Members) -> None:
        for keep in self._keepers:
            await keep(response)


class EditedEvents(StreamingResponse):
    """A streamed response, which is edited while it is sent.

    Each chunk that a replica sends consists of complete events.
    """

    def __init__(self, edit: ResponseEdit, stream: StreamingResponse) -> None:
        super().__init__((), status_code=stream.status_code)
        self.raw_headers = stream.raw_headers  # the same list, so that headers added here are sent
        self._edit = edit
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_edited(message: Message) -> None:
            if body := message.get("body"):
                with suppress(*DECODE_ERRORS, LookupError):
                    message = {**message, "body": await self._edit.events(body)}
            await send(message)

        await self._stream(scope, receive, send_edited)
