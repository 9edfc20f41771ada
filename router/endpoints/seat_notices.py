"""Notices to the client of a stream while it waits for a seat, which may take minutes.

Without notices, proxies would close the connection, and users would think that it hangs. The
response's headers are sent before a replica is chosen, so they do not name the replica.
"""

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Send

from kvroute.router.api.calls import MESSAGES, Call
from kvroute.router.api.errors import EVENTS, ApiError, error_event, event

COMMENT = b": waiting for a seat\n\n"  # clients skip comments
PING = b'event: ping\ndata: {"type":"ping"}\n\n'  # the event that Anthropic's API sends in a pause


class SeatNotices:
    """The notices to one client; the first starts the response that the answer then continues."""

    def __init__(self, send: Send) -> None:
        self.has_begun = False
        self._send = send
        self._path = ""

    def of(self, call: Call) -> Callable[[], Awaitable[None]] | None:
        """Return a function that sends a notice; None if the response is not a stream."""
        return partial(self._notice, call.path) if call.body.get("stream") is True else None

    async def _notice(self, path: str) -> None:
        if not self.has_begun:
            self.has_begun, self._path = True, path
            head = StreamingResponse((), media_type=EVENTS).raw_headers
            await self._send({"type": "http.response.start", "status": 200, "headers": head})
        await self._body(PING if path == MESSAGES else COMMENT, is_last=False)

    async def send(self, message: Message) -> None:
        """Send a part of the response, but not its headers, which the first notice has sent."""
        if message["type"] != "http.response.start":
            await self._send(message)

    async def failed(self, error: ApiError) -> None:
        """End the response with an error."""
        await self._body(event(error, b"", path=self._path), is_last=True)

    async def refused(self, response: Response) -> None:
        """End the response with the error in the body of an error response."""
        body, status = bytes(response.body), response.status_code
        await self._body(error_event(body, status, path=self._path), is_last=True)

    async def _body(self, data: bytes, *, is_last: bool) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": not is_last}
        await self._send(message)
