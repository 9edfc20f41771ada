"""Reads a request's body part by part, and decompresses it as its Content-Encoding says."""

import asyncio
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError
from starlette.requests import ClientDisconnect, Request

from kvroute.router.api.errors import ApiError, invalid

PIECE_BYTES = 64 << 10  # most bytes that are decompressed at once, so that a bomb takes no memory
MAX_CODINGS = 3  # most codings of one body
# How many times as large a body with several codings may get when one of them is decoded, except
# the last one. Data that is compressed already hardly gets smaller in another coding. A body that
# does so was made to take time, which no limit of its size ends.
MAX_OUTER_RATIO = 10
# How many times as large as its content a compressed body may be. A compressor adds a few bytes to
# each block that it cannot compress. A body that is larger consists of empty streams without an
# end, which no limit of its content ends. SPARE_BYTES may come before the first byte of content.
MAX_EXPANSION = 2
SPARE_BYTES = 1 << 20
# Largest window of zstd that takes memory before a byte is decompressed: 8 MB, as RFC 9659 says.
ZSTD_OPTIONS: dict[int, int] = {DecompressionParameter.window_log_max: 23}


class Decompressor(Protocol):
    """Decompresses one stream of a coding."""

    @property
    def eof(self) -> bool:
        """Return whether the end of the compressed data was reached."""

    @property
    def unused_data(self) -> bytes:
        """Return what follows the end of the compressed data."""

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """Return up to `max_length` further bytes."""


class Inflate:
    """Decompresses gzip or deflate, with the methods of a ZstdDecompressor.

    Args:
        window: zlib's code for the format, such as 31 for gzip.
    """

    def __init__(self, window: int) -> None:
        self._zlib = zlib.decompressobj(window)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


def _deflate(data: bytes) -> Decompressor:
    """Return a decompressor of deflate: with zlib's header, or without, as some clients send it."""
    has_header = data[0] & 0x0F == 8 and data[0] >> 4 < 8
    return Inflate(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


def _gzip(_: bytes) -> Decompressor:
    return Inflate(zlib.MAX_WBITS + 16)


# Coding -> a function that gets the first bytes of a stream, and returns its decompressor.
CODINGS: dict[str, Callable[[bytes], Decompressor]] = {
    "gzip": _gzip,
    "zstd": lambda _: ZstdDecompressor(options=ZSTD_OPTIONS),
    "deflate": _deflate,
    "x-gzip": _gzip,
}
# Zeros may follow gzip, as its own program accepts it: files on tapes are padded with them.
PADDING = {"gzip": b"\0", "x-gzip": b"\0"}
ACCEPTED = {"Accept-Encoding": "gzip, zstd, deflate"}


class Coding:
    """Decompresses a body that has one coding. It may consist of several compressed streams.

    Args:
        name: a key of CODINGS.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._new = CODINGS[name]
        self.received = self.returned = 0  # bytes before and after decompression
        self._stream: Decompressor | None = None  # None: the next byte begins a stream
        self._ignored = b""  # bytes that are ignored between two streams

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield what the next part of the body contains, in pieces of up to PIECE_BYTES.

        A piece is empty where a stream ends.

        Raises:
            ApiError: The data does not have this coding.
        """
        self.received += len(data)
        while data:
            if self._stream is None and not (data := data.lstrip(self._ignored)):
                return
            stream = self._stream = self._stream or self._new(data)
            try:
                while not stream.eof and (piece := stream.decompress(data, PIECE_BYTES)):
                    data = b""
                    self.returned += len(piece)
                    yield piece
            except (zlib.error, ZstdError):
                raise _refused(
                    f"the body is not {self._name}, which its Content-Encoding names; send it as "
                    "it says, or without this header"
                ) from None
            data = b""
            if stream.eof:
                data, self._stream = stream.unused_data, None
                self._ignored = PADDING.get(self._name, b"")
                yield b""  # a part may have thousands of streams, each of which takes some time

    def end(self) -> None:
        """Raise ApiError if the body ended within a compressed stream."""
        if self._stream is not None:
            raise invalid(
                None, f"the body ends before its {self._name} data does; send the request again"
            )


class BodyParts:
    """The parts of a request's body, decompressed.

    Args:
        silence_s: longest time between two parts, in seconds.
    """

    def __init__(self, request: Request, *, silence_s: float) -> None:
        """Read the codings.

        Raises:
            ApiError: the router does not know a coding.
        """
        self._stream = aiter(request.stream())
        self._silence_s = silence_s
        self._codings = _codings(request.headers.getlist("content-encoding"))
        self._pieces: Iterator[bytes] = iter(())
        self._received = 0  # bytes of the body, as they came

    async def next(self) -> bytes | None:
        """Return the next part; None at the end of the body.

        Raises:
            ApiError: no part has come for `silence_s`, the client has disconnected, or the body
                does not have its codings.
        """
        while self._codings:
            if (piece := next(self._pieces, None)) is not None:
                self._check_ratios()
                await asyncio.sleep(0)  # a body with a high ratio must not stop the event loop
                if piece:
                    return piece
                continue
            if (part := await self._next()) is None:
                for coding in self._codings:
                    coding.end()
                return None
            self._pieces = _decompressed(part, self._codings)
        return await self._next()

    @property
    def is_compressed(self) -> bool:
        """Return whether the body has a coding."""
        return bool(self._codings)

    async def skip(self) -> int:
        """Receive the rest of the body, keep nothing of it, and return its bytes as they came.

        A client does not read the answer before it has sent the whole body.
        """
        before = self._received
        while await self._next() is not None:
            pass
        return self._received - before

    def _check_ratios(self) -> None:
        """Raise ApiError if a body was made to take time.

        It is much larger than its content, or was compressed before and has got much smaller.
        """
        for coding in self._codings:
            if coding.received > MAX_EXPANSION * coding.returned + SPARE_BYTES:
                raise _refused(
                    f"the body has {coding.received} compressed bytes and {coding.returned} others "
                    "so far; send it without empty streams, or uncompressed"
                )
        for coding in self._codings[:-1]:
            if coding.returned > MAX_OUTER_RATIO * coding.received + PIECE_BYTES:
                raise _refused(
                    "the body gets more than ten times as large in one of its codings, and has "
                    "another one; send it with one coding"
                )

    async def _next(self) -> bytes | None:
        """Return the next part as it came."""
        try:
            async with asyncio.timeout(self._silence_s):
                part: bytes | None = await anext(self._stream, None)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body stopped after {self._received} bytes: no data came for "
                f"{self._silence_s:g} s. Send the request again",
                code="request_timeout",
            ) from None
        except ClientDisconnect:
            message = "the client disconnected before it had sent the whole body"
            raise ApiError(499, message, code="client_left") from None
        self._received += len(part or b"")
        return part


def _codings(headers: list[str]) -> list[Coding]:
    """Return the codings of a body, the last one first, as they have to be decoded."""
    names = [name.strip().lower() for header in headers for name in header.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if unknown := next((name for name in names if name not in CODINGS), None):
        raise _refused(
            f"Content-Encoding {unknown[:40]!r} is not known; send the body as gzip, zstd or "
            "deflate, or uncompressed"
        )
    if len(names) > MAX_CODINGS:
        raise _refused(f"the body has {len(names)} codings; {MAX_CODINGS} at most are decoded")
    return [Coding(name) for name in reversed(names)]


def _decompressed(data: bytes, codings: list[Coding]) -> Iterator[bytes]:
    """Yield the decompressed pieces of a part, and an empty piece where time has passed."""
    if not codings:
        yield data
        return
    for piece in codings[0].pieces(data):
        yield from _decompressed(piece, codings[1:])
    yield b""


def _refused(message: str) -> ApiError:
    return ApiError(415, message, headers=ACCEPTED)
