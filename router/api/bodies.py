"""Requests' bodies are read and parsed such that no body holds up another request.

A small body is parsed on the event loop. A large one is parsed in a process of its own: its JSON
may hold millions of values, and Python builds all of them without a pause.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

from fastapi import Depends
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from kvroute.router.api.errors import ApiError
from kvroute.router.api.parse_process import ParseProcess
from kvroute.router.api.parsing import parse
from kvroute.router.api.turns import Turns

INLINE_BYTES = 128 << 10  # about 20 ms of parsing at worst, 1 ms as a rule
SMALL_BYTES = 8 << 10  # parsed at once: most bodies, in less than 1 ms
SILENCE_S = 30.0  # between two parts of a body
WAITING_LIMITS = 16  # bodies of the largest size that may be in memory at once, not yet parsed

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")


class Bodies:
    """Reads and parses bodies of up to `limit_mb`. A method raises ApiError for a bad body."""

    def __init__(self, *, limit_mb: int) -> None:
        self._limit_mb = limit_mb
        self._limit = limit_mb << 20  # bytes
        self._held = 0  # bytes of unparsed bodies
        self._process = ParseProcess()
        self._turns = Turns()

    async def parsed(self, model: type[Model], request: Request) -> Model:
        """The request's body as that model."""
        return await self.read(partial(parse, model), request)

    async def close(self) -> None:
        """Ends the process."""
        await self._process.close()

    async def read(self, parse: Callable[[bytes], Result], request: Request) -> Result:
        """What that function, which must be importable, makes of the body."""
        body = bytearray()
        try:
            await self._read(request, body)
            if len(body) > INLINE_BYTES:
                return await self._process.run(parse, body)
            if len(body) <= SMALL_BYTES:
                return parse(bytes(body))
            await self._turns.next()
            return parse(bytes(body))
        finally:
            self._held -= len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        """Reads the whole body. One that is too large is also read to its end: the client reads the
        error only after it has sent everything."""
        size, parts = 0, aiter(request.stream())
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    part = await anext(parts, None)
            except TimeoutError:
                raise _silent(size) from None
            except ClientDisconnect:
                raise ApiError(499, "the client left amid its body", code="client_left") from None
            if part is None:
                break
            size += len(part)
            if size > self._limit:
                self._held -= len(body)
                body.clear()
            else:
                self._hold(len(part))
                body += part
        if size > self._limit:
            raise self._too_large(size)

    def _hold(self, size: int) -> None:
        if self._held + size > WAITING_LIMITS * self._limit:
            raise ApiError(
                429,
                f"the bodies of other requests take {self._held >> 20} MB now; try again later",
                type="rate_limit_error",
                code="overloaded",
            )
        self._held += size

    def _too_large(self, size: int) -> ApiError:
        return ApiError(
            413,
            f"the body has {size} bytes; the limit is {self._limit} ({self._limit_mb} MB). Send a "
            "shorter prompt, or raise KVROUTE_MAX_BODY_MB",
            code="request_too_large",
        )


async def _bodies(request: Request) -> Bodies:
    bodies: Bodies = request.app.state.bodies
    return bodies


BodyReader = Annotated[Bodies, Depends(_bodies)]  # a route's parameter


def _silent(size: int) -> ApiError:
    return ApiError(
        408,
        f"{size} bytes of the body came, and then nothing for {SILENCE_S:g} s; send it again",
        code="request_timeout",
    )
