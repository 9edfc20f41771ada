"""Signs of life for the client of a stream that waits for a seat, which may take minutes.

Without them, proxies close the connection and people take the wait for a hang. The response's head
goes out before it is known which replica answers, so it lacks the headers that say so.
"""

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Send

from kvroute.router.api.calls import MESSAGES, Call
from kvroute.router.api.errors import EVENTS, ApiError, event, event_of_refusal

COMMENT = b": waiting for a seat\n\n"  # clients skip comments
PING = b'event: ping\ndata: {"type":"ping"}\n\n'  # the same as Anthropic's API has it


class SeatNotices:
    """The notices to one client. The first one begins its response, which a real one continues."""

    def __init__(self, send: Send) -> None:
        self.has_begun = False
        self._send = send
        self._path = ""

    def of(self, call: Call) -> Callable[[], Awaitable[None]] | None:
        """Return what sends a notice; None: the client gets a whole response, and waits for it."""
        return partial(self._notice, call.path) if call.body.get("stream") is True else None

    async def _notice(self, path: str) -> None:
        if not self.has_begun:
            self.has_begun, self._path = True, path
            head = StreamingResponse((), media_type=EVENTS).raw_headers
            await self._send({"type": "http.response.start", "status": 200, "headers": head})
        await self._body(PING if path == MESSAGES else COMMENT, is_last=False)

    async def send(self, message: Message) -> None:
        """Send a part of the response, but not another head."""
        if message["type"] != "http.response.start":
            await self._send(message)

    async def failed(self, error: ApiError) -> None:
        """End the response with an error."""
        await self._body(event(error, b"", path=self._path), is_last=True)

    async def refused(self, response: Response) -> None:
        """End the response with the error that another one has."""
        body, status = bytes(response.body), response.status_code
        await self._body(event_of_refusal(body, status, path=self._path), is_last=True)

    async def _body(self, data: bytes, *, is_last: bool) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": not is_last}
        await self._send(message)
