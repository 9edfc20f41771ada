"""Signs of life: what the client of a stream gets while there is nothing to send.

A request may wait in the queue for minutes, and a replica may compute a long prompt for minutes.
Without a byte, proxies close the connection, and clients give up. The first sign of life starts the
response before a replica is chosen, so its headers do not contain the replica.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Send

from kvroute.router.api.calls import MESSAGES, Call
from kvroute.router.api.errors import EVENTS, ApiError, event
from kvroute.router.dispatch.replica_errors import error_event
from kvroute.router.serving.models import Models

PING = b'event: ping\ndata: {"type":"ping"}\n\n'  # Anthropic's event for pauses
COMMENT = b": waiting\n\n"  # clients ignore comments in a stream


class SignsOfLife:
    """The signs of life to one client, until its answer begins. The answer continues the response.

    Args:
        send: sends a message to the client.
        every_s: seconds until the first sign, and between two; 0: none are sent.
    """

    def __init__(self, send: Send, every_s: float) -> None:
        self.has_started = False  # true once a sign has started the response
        self._send = send
        self._every_s = every_s
        self._path = ""
        self._headers: Mapping[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None  # starts the task
        self._task: asyncio.Task[None] | None = None  # sends the signs
        self._ended = asyncio.Event()

    def begin(self, call: Call, headers: Mapping[str, str]) -> None:
        """Send signs of life from now on, if the answer to the call is a stream.

        Args:
            headers: headers of the response that are known before a replica is chosen.
        """
        if call.body.get("stream") is True and self._every_s and not self._timer:
            self._path, self._headers = call.path, headers
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._every_s, self._start)

    async def end(self) -> None:
        """Send none from now on. Later calls have no effect."""
        if self._timer is not None:
            self._timer.cancel()
            self._ended.set()
            if self._task is not None:
                await self._task

    def _start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        head = StreamingResponse((), headers=self._headers, media_type=EVENTS).raw_headers
        self.has_started = True
        with suppress(OSError):  # the client has left
            await self._send({"type": "http.response.start", "status": 200, "headers": head})
            while not self._ended.is_set():
                await self._body(sign_of_life(self._path), is_last=False)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._every_s):
                        await self._ended.wait()

    async def send(self, message: Message) -> None:
        """Send a part of the response, except its start, which the first sign has sent."""
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


def keep_alive_s(request: Request) -> float:
    """Return --keep-alive-s: the seconds between two signs of life; 0: none are sent."""
    models: Models = request.app.state.models
    return models.first.settings.keep_alive_s


def sign_of_life(path: str) -> bytes:
    """Return what clients of a route ignore between the events of a stream."""
    return PING if path == MESSAGES else COMMENT


async def with_signs_of_life(
    events: AsyncIterator[bytes], *, path: str, every_s: float
) -> AsyncIterator[bytes]:
    """Yield the events of a stream, and a sign of life after each `every_s` without an event.

    Args:
        every_s: seconds; 0: yield no signs.
    """
    while True:
        following = asyncio.ensure_future(anext(events, None))
        try:
            while not (await asyncio.wait([following], timeout=every_s or None))[0]:
                yield sign_of_life(path)
        finally:
            if not following.done():
                following.cancel()
                await asyncio.wait([following])
        if (found := following.result()) is None:
            return
        yield found
