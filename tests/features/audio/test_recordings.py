"""Forms with recordings are kept in temporary files, as the client sent them, within limits."""

import asyncio
import errno
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from kvroute.contract.http_call import PART_BYTES
from kvroute.features.audio import body_file
from kvroute.features.audio.recordings import (
    ASSUMED_RATE,
    HELD_LIMITS,
    MAX_FIELD_BYTES,
    MAX_FIELDS,
    OTHER_BYTES,
    Recordings,
    seconds_of,
)
from kvroute.router.api.errors import ApiError
from kvroute.router.endpoints import form as form_module
from tests.support.tiny_audio import RATE, form, sound

LIMIT_MB = 1
FIELDS = {"model": "whisper", "prompt": "a “cat”", "timestamp_granularities[]": ["word", "segment"]}
KIND = "multipart/form-data; boundary=x"


def request(parts: Iterable[bytes], content_type: str = KIND, *, ends: bool = True) -> Request:
    """Return a request whose body comes in these parts; without `ends`, its client then leaves."""
    given_parts, is_over = iter(parts), False

    async def receive() -> dict[str, Any]:
        nonlocal is_over
        if (part := next(given_parts, None)) is not None:
            return {"type": "http.request", "body": part, "more_body": True}
        if is_over or not ends:
            return {"type": "http.disconnect"}
        is_over = True
        return {"type": "http.request", "body": b"", "more_body": False}

    headers = [(b"content-type", content_type.encode("latin-1"))] if content_type else []
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


def part(name: str, value: bytes, more: bytes = b"") -> bytes:
    head = b'--x\r\nContent-Disposition: form-data; name="' + name.encode() + b'"' + more
    return head + b"\r\n\r\n" + value + b"\r\n"


FILE = part("file", b"sound", b'; filename="a.wav"')
END = b"--x--\r\n"


async def refusal(recordings: Recordings, request: Request) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await recordings.read(request)
    assert recordings._held == 0
    return refused.value


def open_files() -> int:
    return psutil.Process().num_fds()


async def content(parts: AsyncIterator[bytes]) -> list[bytes]:
    return [part async for part in parts]


@given(st.lists(st.integers(1, 5000), min_size=1), st.binary(max_size=2000))
def test_a_form_is_kept_byte_for_byte_however_it_arrives(sizes: list[int], file: bytes) -> None:
    body, content_type = form(FIELDS, file)

    def pieces() -> Iterator[bytes]:
        begin = 0
        while begin < len(body):
            for size in sizes:
                yield body[begin : begin + size]
                begin += size

    async def kept() -> None:
        recordings = Recordings(limit_mb=LIMIT_MB)
        with await recordings.read(request(filter(None, pieces()), content_type)) as recording:
            for _ in range(2):  # another replica may get it again
                assert b"".join(await content(recording.parts())) == body
            assert recording.fields["model"] == "whisper"
            assert recording.fields["prompt"] == "a “cat”"
            assert recording.upload.size == len(body) == recordings._held
        assert recordings._held == 0

    asyncio.run(kept())


async def test_a_replica_gets_a_content_type_with_the_boundary_only() -> None:
    """A charset could make it read other names of fields than the router."""
    recordings = Recordings(limit_mb=LIMIT_MB)
    kind = f"{KIND}; charset=utf-16"
    with await recordings.read(request([FILE, END], kind)) as recording:
        assert recording.upload.content_type == 'multipart/form-data; boundary="x"'


async def test_the_same_form_has_the_same_digest_with_another_boundary() -> None:
    """So that a request that crashes replicas is recognised when a client repeats it."""
    recordings, digests = Recordings(limit_mb=LIMIT_MB), set[bytes]()
    for fields, file in ((FIELDS, b"a"), (FIELDS, b"a"), (FIELDS, b"b"), ({"model": "m"}, b"a")):
        body, content_type = form(fields, file)
        with await recordings.read(request([body], content_type)) as recording:
            digests.add(recording.upload.digest)
    assert len(digests) == 3


async def test_a_large_recording_is_neither_in_memory_nor_in_one_part() -> None:
    recordings, before = Recordings(limit_mb=64), psutil.Process().memory_full_info().uss
    parts = [part("file", b"", b'; filename="a"')[:-2], *[b"a" * 65_536] * 900, b"\r\n", END]
    with await recordings.read(request(parts)) as recording:
        sizes = []
        async for data in recording.parts():
            sizes.append(len(data))
        assert max(sizes) == PART_BYTES
        assert sum(sizes) == recording.upload.size > 900 * 65_536
        assert psutil.Process().memory_full_info().uss - before < 20e6


async def test_a_recording_above_the_limit_is_read_to_its_end_and_refused() -> None:
    recordings, size = Recordings(limit_mb=LIMIT_MB), (LIMIT_MB << 20) + 1
    parts = [part("file", b"a" * size, b'; filename="a"'), END]
    refused = await refusal(recordings, request(parts))
    assert (refused.status, refused.code, refused.param) == (413, "request_too_large", "file")
    assert str(size) in refused.message
    assert "--max-audio-mb" in refused.message
    parts = [part("file", b"", b'; filename="a"')[:-2], *[b"a" * 65_536] * 160, b"\r\n", END]
    refused = await refusal(recordings, request(parts))  # the file is deleted before its end
    assert refused.status == 413
    assert str(160 * 65_536)[:3] in refused.message


async def test_the_space_of_all_recordings_is_limited() -> None:
    recordings = Recordings(limit_mb=LIMIT_MB)
    size = (LIMIT_MB << 20) - 1000
    parts = [part("file", b"a" * size, b'; filename="a"'), END]
    most = HELD_LIMITS * ((LIMIT_MB << 20) + OTHER_BYTES)
    with ExitStack() as kept:
        while recordings._held + size + 1000 <= most:
            kept.enter_context(await recordings.read(request(parts)))
        with pytest.raises(ApiError) as refused:
            await recordings.read(request(parts))
        assert (refused.value.status, refused.value.code) == (429, "overloaded")
    assert recordings._held == 0


BAD: dict[str, tuple[list[bytes], str, int, str]] = {
    "no file": ([part("model", b"m"), END], KIND, 400, "no field `file`"),
    "no boundary": ([FILE, END], "multipart/form-data", 415, "boundary"),
    "another type": ([b"{}"], "application/json", 415, "multipart/form-data"),
    "no type": ([b"{}"], "", 415, "multipart/form-data"),
    "an empty form": ([END], KIND, 400, "no field `file`"),
    "no form at all": ([b"hello"], KIND, 400, "is not complete"),
    "an empty body": ([], KIND, 400, "file"),
    "two files": ([FILE, FILE, END], KIND, 400, "two files"),
    "an end before the file's name": (
        [FILE[:-20]],
        KIND,
        400,
        "is not complete: its last line, --x--",
    ),
    "an end in the file": ([FILE[:-3]], KIND, 400, "is not complete"),
    "an end after the file": ([FILE], KIND, 400, "is not complete"),
    "half of its end": ([FILE, END[:-3]], KIND, 400, "is not complete"),
    "another boundary": ([b"y" * 40_000, b"y" * 40_000, FILE, END], KIND, 400, "--x was expected"),
    "a boundary with a new line": (
        [FILE, END],
        'multipart/form-data; boundary="a\nb"',
        400,
        "2046",
    ),
    "a long boundary": ([FILE], f"multipart/form-data; boundary={'x' * 300}", 400, "not valid"),
    "a long field": (
        [part("prompt", b"a" * (MAX_FIELD_BYTES + 1)), FILE, END],
        *(KIND, 400, str(MAX_FIELD_BYTES)),
    ),
    "a field that is long after the file": (
        [FILE, part("prompt", b"a" * (MAX_FIELD_BYTES + 1)), END],
        *(KIND, 400, str(MAX_FIELD_BYTES)),
    ),
    "long headers": ([part("a", b"", b"; b=" + b"c" * 100_000), FILE], KIND, 400, "not valid"),
    "many headers": ([b"--x\r\n" + b"A: b\r\n" * 1000 + b"\r\n", FILE], KIND, 400, "not valid"),
    "a header without an end": ([b"--x\r\nA: " + b"b" * (1 << 20)], KIND, 400, "not valid"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_form_that_is_not_valid_is_refused(name: str) -> None:
    parts, content_type, status, words = BAD[name]
    before = open_files()
    refused = await refusal(Recordings(limit_mb=LIMIT_MB), request(parts, content_type))
    assert (refused.status, words in refused.message) == (status, True), refused.message
    assert open_files() == before


async def test_a_form_of_a_hundred_million_parts_is_refused_at_its_first_ones() -> None:
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1_000_000):
            sent += 1
            yield part("a", b"b") * 100

    refused = await refusal(Recordings(limit_mb=LIMIT_MB), request(parts()))
    assert (refused.status, sent) == (400, 1)
    assert f"more than {MAX_FIELDS} fields" in refused.message


async def test_a_client_that_leaves_gets_status_499_and_leaves_no_file() -> None:
    before = open_files()
    refused = await refusal(Recordings(limit_mb=LIMIT_MB), request([FILE], ends=False))
    assert (refused.status, refused.code) == (499, "client_left")
    assert open_files() == before


async def test_a_form_that_stops_is_refused_after_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(form_module, "SILENCE_S", 0.01)

    async def receive() -> dict[str, Any]:
        return await asyncio.Future()

    headers = [(b"content-type", KIND.encode())]
    silent = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    assert (await refusal(Recordings(limit_mb=LIMIT_MB), silent)).status == 408


async def test_a_form_that_comes_too_slowly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_module, "SILENCE_S", 0.5)
    headers, bodies = [(b"content-type", KIND.encode())], chain([FILE], repeat(b"y"))

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": next(bodies), "more_body": True}

    slow = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    refused = await refusal(Recordings(limit_mb=LIMIT_MB), slow)
    assert refused.status == 408
    assert "1000 bytes per second" in refused.message


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EROFS, 503)])
async def test_a_disk_that_takes_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    def write(self: object, data: object) -> None:
        raise OSError(number, "cannot")

    monkeypatch.setattr(body_file.BodyFile, "_write", write)
    refused = await refusal(Recordings(limit_mb=LIMIT_MB), request([FILE, END]))
    assert refused.status == status
    assert "TMPDIR" in refused.message


def test_the_length_of_a_wav_file_is_in_its_header() -> None:
    for seconds in (1, 7, 60):
        file = sound(seconds=seconds)
        assert seconds_of(file[:4096], len(file)) == seconds
    half = sound(seconds=8, rate=RATE // 2)
    assert seconds_of(half[:4096], len(half)) == 8


@pytest.mark.parametrize(
    ("head", "size", "seconds"),
    [
        (b"ID3", 60 * ASSUMED_RATE, 60),
        (b"", 0, 1),
        (b"RIFF????WAVEfmt " + bytes(20), 25 << 20, 52_429),  # a rate of 0 bytes per second
        (b"RIFF????WAVEfmt ", 1000, 2),
    ],
)
def test_the_length_of_other_files_is_estimated(head: bytes, size: int, seconds: int) -> None:
    assert seconds_of(head, size) == seconds


async def test_a_temporary_file_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is deleted even if the process is killed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with await Recordings(limit_mb=LIMIT_MB).read(request([FILE, END])):
        assert not [*tmp_path.iterdir()]  # noqa: ASYNC240
