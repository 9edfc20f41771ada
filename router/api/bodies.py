"""Reads and parses requests' bodies without delaying other requests.

A small body is parsed on the event loop. A large body is parsed in a child process: its JSON may
have millions of values, and the event loop would stand still until all of them were built.
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

INLINE_BYTES = 128 << 10  # largest body parsed on the event loop: usually 1 ms, at worst 20 ms
SMALL_BYTES = 8 << 10  # bodies up to this size, which take less than 1 ms, are parsed at once
SILENCE_S = 30.0  # longest time between two parts of a body
WAITING_LIMITS = 16  # unparsed bodies of the largest size that fit in memory at the same time

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")


class Bodies:
    """Reads and parses bodies of up to `limit_mb` megabytes; a bad body raises ApiError."""

    def __init__(self, *, limit_mb: int) -> None:
        self._limit_mb = limit_mb
        self._limit = limit_mb << 20  # bytes
        self._held = 0  # bytes of unparsed bodies in memory
        self._process = ParseProcess()
        self._turns = Turns()

    async def parsed(self, model: type[Model], request: Request) -> Model:
        """Return the request's body as an instance of the model."""
        return await self.read(partial(parse, model), request)

    async def close(self) -> None:
        """Kill the process that parses large bodies."""
        await self._process.close()

    async def read(self, parse: Callable[[bytes], Result], request: Request) -> Result:
        """Return the result of `parse`, which must be importable, for the request's body."""
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
        """Read the whole body into `body`.

        A body that is too large is also read to its end, because the client does not read the
        error before it has sent everything.
        """
        size, parts = 0, aiter(request.stream())
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    part = await anext(parts, None)
            except TimeoutError:
                raise _silent(size) from None
            except ClientDisconnect:
                message = "the client disconnected before it had sent the whole body"
                raise ApiError(499, message, code="client_left") from None
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
                f"the router holds {self._held >> 20} MB of other requests' bodies, which is its "
                "limit; try again later",
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


BodyReader = Annotated[Bodies, Depends(_bodies)]  # the type of a route's parameter


def _silent(size: int) -> ApiError:
    return ApiError(
        408,
        f"the body stopped after {size} bytes: nothing came for {SILENCE_S:g} s. Send the request "
        "again",
        code="request_timeout",
    )
