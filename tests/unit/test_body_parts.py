"""Compressed bodies are decompressed as a stream, within the same limit as others."""

import asyncio
import gzip
import tracemalloc
import zlib
from collections.abc import Callable, Iterator

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from kvroute.router.api.bodies import Bodies
from kvroute.router.api.body_parts import MAX_CODINGS, PIECE_BYTES, SPARE_BYTES, BodyParts
from kvroute.router.api.errors import ApiError


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "X-Gzip": gzip.compress,
    "zstd": zstd.compress,
    "deflate": zlib.compress,
    "Deflate": raw_deflate,
    "identity": bytes,
}
WORDS = b"the cat sat on the mat " * 20_000
BOMB = bytes(32 << 20)


def request(body: bytes, coding: str, part_bytes: int = 1 << 16, **headers: str) -> Request:
    """Return a request with a Content-Encoding, whose body comes in parts of this size."""
    parts = (body[at : at + part_bytes] for at in range(0, len(body), part_bytes))
    messages = messages_of(parts)

    async def receive() -> dict[str, object]:
        return next(messages)

    pairs = {"content-encoding": coding, **headers}.items()
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in pairs]
    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


def messages_of(parts: Iterator[bytes]) -> Iterator[dict[str, object]]:
    for part in parts:
        yield {"type": "http.request", "body": part, "more_body": True}
    yield {"type": "http.request", "body": b"", "more_body": False}


async def content(request: Request) -> bytes:
    parts, body = BodyParts(request, silence_s=10), bytearray()
    while (part := await parts.next()) is not None:
        assert len(part) <= PIECE_BYTES
        body += part
    return bytes(body)


async def refusal(request: Request, *, limit_mb: int = 1) -> ApiError:
    bodies = Bodies(limit_mb=limit_mb)
    with pytest.raises(ApiError) as refused:
        await bodies.read(bytes, request)
    return refused.value


@given(
    body=st.binary() | st.just(WORDS[:2000]),
    codings=st.lists(st.sampled_from([*COMPRESSORS]), max_size=2),
    part_bytes=st.integers(1, 300),
)
async def test_a_body_of_any_codings_is_the_body_without(
    body: bytes, codings: list[str], part_bytes: int
) -> None:
    compressed = body
    for coding in codings:
        compressed = COMPRESSORS[coding](compressed)
    assert await content(request(compressed, ", ".join(codings), part_bytes)) == body


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_a_body_may_be_several_compressed_streams(coding: str) -> None:
    body = COMPRESSORS[coding](b"one, ") + COMPRESSORS[coding](b"") + COMPRESSORS[coding](WORDS)
    assert await content(request(body, coding)) == b"one, " + WORDS


@pytest.mark.parametrize("coding", ["gzip", "zstd", "deflate"])
async def test_a_bomb_is_too_large_and_takes_no_memory(coding: str) -> None:
    bomb = request(COMPRESSORS[coding](BOMB), coding)
    tracemalloc.start()
    refused = await refusal(bomb)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (refused.status, most < 4 << 20) == (413, True)
    assert refused.message.startswith(f"the body has more than {1 << 20} bytes; the limit is")


async def test_a_bomb_of_empty_streams_is_refused_early() -> None:
    empty = gzip.compress(b"") * 50_000
    refused = await refusal(request(gzip.compress(empty), "gzip, gzip"))
    assert (refused.status, "ten times as large" in refused.message) == (415, True)


@pytest.mark.parametrize("compress", [gzip.compress, zstd.compress, zlib.compress])
async def test_other_requests_run_between_many_empty_streams(
    compress: Callable[[bytes], bytes],
) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    coding = {gzip.compress: "gzip", zstd.compress: "zstd", zlib.compress: "deflate"}[compress]
    assert await content(request(compress(b"") * 100, coding)) == b""
    other.cancel()
    assert turns >= 100


async def test_a_window_that_takes_much_memory_is_refused() -> None:
    options: dict[int, int] = {zstd.CompressionParameter.window_log: 27}
    compressor = zstd.ZstdCompressor(options=options)
    body = compressor.compress(WORDS) + compressor.flush()
    assert (await refusal(request(body, "zstd"))).status == 415


@pytest.mark.parametrize("coding", ["br", "gzip, br", "compress", "aws-chunked"])
async def test_a_coding_that_is_not_known_is_named(coding: str) -> None:
    refused = await refusal(request(b"{}", coding))
    assert refused.status == 415
    assert f"Content-Encoding {coding.split()[-1]!r} is not known" in refused.message
    assert refused.headers == {"Accept-Encoding": "gzip, zstd, deflate"}


@pytest.mark.parametrize("coding", ["gzip", "zstd", "deflate"])
@pytest.mark.parametrize("body", [b'{"prompt": "hi"}', b"\0" * 100, b"x"])
async def test_a_coding_that_the_body_does_not_have_is_named(coding: str, body: bytes) -> None:
    refused = await refusal(request(body, coding))
    assert refused.status in ({415} if len(body) > 1 else {400, 415})
    assert coding in refused.message


@pytest.mark.parametrize("coding", ["gzip", "zstd", "deflate"])
async def test_a_body_that_ends_too_early_is_refused(coding: str) -> None:
    refused = await refusal(request(COMPRESSORS[coding](WORDS)[:-6], coding))
    assert (refused.status, refused.message) == (
        400,
        f"the body ends before its {coding} data does; send the request again",
    )


async def test_more_codings_than_anybody_uses_are_refused() -> None:
    refused = await refusal(request(b"", ", ".join(["gzip"] * (MAX_CODINGS + 1))))
    assert refused.status == 415


async def test_a_client_that_asks_first_is_told_at_once_that_its_body_is_too_large() -> None:
    asked = request(b"", "identity", content_length="9000000", expect="100-continue")
    assert (await refusal(asked)).message.startswith("the body has 9000000 bytes; the limit is")


async def test_gzip_may_be_padded_with_zeros() -> None:
    for padding in (b"\0" * 512, b"\0\0" + gzip.compress(b"") + b"\0"):
        assert await content(request(gzip.compress(WORDS) + padding, "gzip")) == WORDS


@pytest.mark.parametrize("stream", [gzip.compress(b"", mtime=0), b"\0"], ids=["gzip", "zero"])
async def test_streams_without_content_end(stream: bytes) -> None:
    endless = gzip.compress(b"x") + stream * (2 * SPARE_BYTES // len(stream))
    refused = await refusal(request(endless, "gzip"))
    assert (refused.status, "without empty streams" in refused.message) == (415, True)
