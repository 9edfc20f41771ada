"""Notices to the client of a stream while its request waits for a feature, perhaps for minutes.

Without notices, proxies would close the connection, and users would think that the request hangs.
The first notice starts the response before a replica is chosen, so the response's headers cannot
contain the replica.
"""

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Send

from kvroute.router.api.calls import MESSAGES, Call
from kvroute.router.api.errors import EVENTS, ApiError, event
from kvroute.router.dispatch.replica_errors import error_event

PING = b'event: ping\ndata: {"type":"ping"}\n\n'  # Anthropic's event for pauses


class WaitNotices:
    """The notices to one client. The first notice starts the response; the answer continues it.

    Args:
        send: sends a message to the client.
    """

    def __init__(self, send: Send) -> None:
        self.has_started = False  # true once a notice has started the response
        self._send = send
        self._path = ""

    def of(self, call: Call) -> Callable[[str], Awaitable[None]] | None:
        """Return a function that sends a notice; None if the response is not a stream.

        The function gets a text that says what the request waits for.
        """
        return partial(self._notice, call.path) if call.body.get("stream") is True else None

    async def _notice(self, path: str, text: str) -> None:
        if not self.has_started:
            self.has_started, self._path = True, path
            head = StreamingResponse((), media_type=EVENTS).raw_headers
            await self._send({"type": "http.response.start", "status": 200, "headers": head})
        comment = f": {text}\n\n".encode()  # clients ignore comments in a stream
        await self._body(PING if path == MESSAGES else comment, is_last=False)

    async def send(self, message: Message) -> None:
        """Send a part of the response, except its start, which the first notice has sent."""
        if message["type"] != "http.response.start":
            await self._send(message)

    async def failed(self, error: ApiError) -> None:
        """End the response with an error."""
        await self._body(event(error, b"", path=self._path), is_last=True)

    async def refused(self, response: Response) -> None:
        """End the response with the error in the body of `response`."""
        body, status = bytes(response.body), response.status_code
        await self._body(error_event(body, status, path=self._path), is_last=True)

    async def _body(self, data: bytes, *, is_last: bool) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": not is_last}
        await self._send(message)
