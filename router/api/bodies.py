"""Reads and parses requests' bodies without delaying other requests.

A small body is parsed in the event loop. A large body is parsed in a child process: its JSON may
have millions of values, and the event loop would be blocked until all of them were created.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

from fastapi import Depends
from pydantic import BaseModel
from starlette.requests import Request

from kvroute.router.api.body_parts import BodyParts
from kvroute.router.api.errors import ApiError
from kvroute.router.api.fair_lock import FairLock
from kvroute.router.api.parse_process import ParseProcess
from kvroute.router.api.parsing import parse

# Largest body in bytes that is parsed in the event loop. This usually takes 1 ms, at most 20 ms.
INLINE_BYTES = 128 << 10
# Bodies of more bytes than this are parsed one by one, and other tasks run between two of them.
# Parsing a smaller body takes less than 1 ms.
SMALL_BYTES = 8 << 10
SILENCE_S = 30.0  # longest time between two parts of a body, in seconds
# Memory for unparsed bodies, as a multiple of the largest allowed body.
HELD_LIMITS = 16

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")


class Bodies:
    """Reads and parses bodies of up to `limit_mb` megabytes. An invalid body raises ApiError."""

    def __init__(self, *, limit_mb: int) -> None:
        self._limit_mb = limit_mb
        self._limit = limit_mb << 20  # largest body in bytes
        self._held = 0  # size of all unparsed bodies in memory, in bytes
        self._process = ParseProcess()
        self._lock = FairLock()

    async def parsed(self, model: type[Model], request: Request) -> Model:
        """Return the request's body as an instance of the model."""
        return await self.read(partial(parse, model), request)

    async def close(self) -> None:
        """Kill the process that parses large bodies."""
        await self._process.close()

    async def read(self, parse: Callable[[bytes], Result], request: Request) -> Result:
        """Read the request's body, and return the result of `parse` for it.

        Args:
            parse: a function that can be imported, since a child process may call it.
        """
        body = bytearray()
        try:
            await self._read(request, body)
            if len(body) > INLINE_BYTES:
                return await self._process.run(parse, body)
            if len(body) <= SMALL_BYTES:
                return parse(bytes(body))
            await self._lock.wait()
            return parse(bytes(body))
        finally:
            self._held -= len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        """Read the whole body into `body`, decompressed.

        Raises:
            ApiError: the body is too large or stopped, the client disconnected, or other bodies
                take too much memory.
        """
        parts, size = BodyParts(request, silence_s=SILENCE_S), 0
        if request.headers.get("expect", "").lower() == "100-continue":
            # This client has not sent the body yet, and reads the answer first.
            announced = int(request.headers.get("content-length", 0))
            if announced > self._limit:
                raise self._too_large(f"{announced}")
        while (part := await parts.next()) is not None:
            size += len(part)
            if size > self._limit:
                self._held -= len(body)
                body.clear()
                skipped = await parts.skip()
                raise self._too_large(
                    f"more than {self._limit}" if parts.is_compressed else f"{size + skipped}"
                )
            self._hold(len(part))
            body += part

    def _hold(self, size: int) -> None:
        """Count this many further bytes of unparsed bodies.

        Raises:
            ApiError: the unparsed bodies would take more memory than the limit.
        """
        if self._held + size > HELD_LIMITS * self._limit:
            raise ApiError(
                429,
                f"the router holds {self._held >> 20} MB of other requests' bodies, which is its "
                "limit; try again later",
                code="overloaded",
            )
        self._held += size

    def _too_large(self, size: str) -> ApiError:
        return ApiError(
            413,
            f"the body has {size} bytes; the limit is {self._limit} ({self._limit_mb} MB). Send a "
            "shorter prompt, or raise --max-body-mb",
            code="request_too_large",
        )


async def _bodies(request: Request) -> Bodies:
    bodies: Bodies = request.app.state.bodies
    return bodies


BodyReader = Annotated[Bodies, Depends(_bodies)]  # FastAPI passes the router's Bodies to routes
