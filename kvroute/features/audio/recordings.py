"""Reads forms with a recording into temporary files, from which replicas get them in parts."""

import errno
import hashlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from starlette.requests import Request

from kvroute.contract.http_call import Upload
from kvroute.features.audio.body_file import BodyFile
from kvroute.features.router_service import RouterService
from kvroute.process.asgi import pieces
from kvroute.process.exposition import Readings
from kvroute.router.api.errors import ApiError, invalid
from kvroute.router.api.fair_lock import FairLock
from kvroute.router.endpoints.form import UploadForm

MAX_FIELDS = 64  # the most fields of a form; vLLM has about 30, and one of them can be repeated
MAX_FIELD_BYTES = 65_536  # longest value of a field, such as the prompt
# Bytes of a form besides the recording: the other fields, and the headers of all parts.
OTHER_BYTES = 1 << 20
# Space for the forms of running requests, as a multiple of the largest allowed recording.
HELD_LIMITS = 16
DIGEST_BYTES = 16  # length of the hash of a form
HEAD_BYTES = 4096  # bytes of a recording in which the header of a WAV file is looked for
# Assumed rate of a recording that is not a WAV file, in bytes per second: 128 kbit/s, the usual
# rate of MP3 files. It only affects the expected load of a replica.
ASSUMED_RATE = 16_000
LEAST_RATE = 500  # the lowest rate of a recording in bytes per second; speech codecs have 4 kbit/s
BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,\-./:=? ]{0,255}[0-9A-Za-z'()+_,\-./:=?]\Z")


class Recording:
    """A form with a recording, in a temporary file. Leaving its context deletes the file.

    Attributes:
        fields: the other fields of the form.
        upload: what a replica gets to know about the form.
        seconds: the estimated length of the recording, at least 1.
    """

    def __init__(self, recordings: "Recordings") -> None:
        self._recordings = recordings
        self._file = BodyFile()
        self.fields: dict[str, str] = {}
        self.upload = Upload(secrets.token_hex(16), 0, "", b"")
        self.seconds = 1

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *_: object) -> None:
        self._recordings.release(self._file.size)
        self._file.size = 0
        self._file.close()

    def parts(self) -> AsyncIterator[bytes]:
        """Yield the form in parts of at most PART_BYTES, as the client sent it. Raises OSError."""
        return pieces(self._file.path)


class Recordings(RouterService):
    """Reads forms with recordings of up to `limit_mb` megabytes in one router."""

    name = "audio"

    def __init__(self, *, limit_mb: int) -> None:
        self._limit_mb = limit_mb
        self._limit = limit_mb << 20  # bytes of the largest recording
        self._lock = FairLock()  # parts of all forms are parsed one by one
        self._held = 0  # bytes of all forms in temporary files
        self._seconds = 0  # estimated length of all recordings so far

    def metrics(self, readings: Readings) -> None:
        readings.gauge(
            "kvroute_recordings_bytes",
            "Recordings in temporary files of the router, until their requests end.",
            lambda: self._held,
        )
        readings.counter(
            "kvroute_recordings_seconds",
            "Estimated length of all recordings that the router has received.",
            lambda: self._seconds,
        )

    async def read(self, request: Request) -> Recording:
        """Return the form in a request's body.

        A form that is too large is read to its end as well, because a client does not read the
        error before it has sent the whole form.

        Raises:
            ApiError: the body is not a valid form, the recording is too large, the forms of other
                requests take too much space, or the disk is full.
        """
        with _storing():
            recording = Recording(self)
            try:
                await self._read(request, recording)
            except BaseException:
                recording.__exit__()
                raise
        self._seconds += recording.seconds
        return recording

    def release(self, size: int) -> None:
        """Stop counting the bytes of a form."""
        self._held -= size

    async def _read(self, request: Request, recording: Recording) -> None:
        file, total = recording._file, 0

        async def store(data: bytes) -> None:
            nonlocal total
            total += len(data)
            if total <= self._limit + OTHER_BYTES:
                self._hold(len(data))
                await file.append(data)
            elif file.size:
                recording.__exit__()
            await self._lock.wait()  # other requests go on between two parts

        form = UploadForm(
            request,
            expected="`file` and `model`",
            max_fields=MAX_FIELDS,
            max_field_bytes=MAX_FIELD_BYTES,
            on_bytes=store,
        )
        boundary = form.boundary
        if not BOUNDARY.match(boundary):
            raise invalid(None, "the boundary in Content-Type has characters that RFC 2046 forbids")
        digest, head, size = hashlib.blake2b(digest_size=DIGEST_BYTES), b"", 0
        await form.begin()
        async for data in form.content():
            digest.update(data)
            head += data[: HEAD_BYTES - len(head)]
            size += len(data)
        if size > self._limit or total > self._limit + OTHER_BYTES:
            raise self._too_large(max(size, total - OTHER_BYTES))
        await file.flush()
        digest.update(json.dumps(form.fields, sort_keys=True).encode())
        recording.fields = form.fields
        recording.seconds = seconds_of(head, size)
        recording.upload = Upload(
            recording.upload.id,
            total,
            f'multipart/form-data; boundary="{boundary.decode()}"',
            digest.digest(),
        )

    def _hold(self, size: int) -> None:
        """Count this many further bytes of forms.

        Raises:
            ApiError: all forms would take more space than the limit.
        """
        if self._held + size > HELD_LIMITS * (self._limit + OTHER_BYTES):
            raise ApiError(
                429,
                f"the router holds {self._held >> 20} MB of other requests' recordings, which is "
                "its limit; try again later",
                code="overloaded",
            )
        self._held += size

    def _too_large(self, size: int) -> ApiError:
        return ApiError(
            413,
            f"the recording has {size} bytes; the limit is {self._limit} ({self._limit_mb} MB). "
            "Split or compress it, or raise --max-audio-mb",
            param="file",
            code="request_too_large",
        )


def seconds_of(head: bytes, size: int) -> int:
    """Return the estimated length of a recording in seconds, at least 1.

    Args:
        head: the first bytes of the file.
        size: bytes of the whole file.
    """
    rate = ASSUMED_RATE
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE" and (begin := head.find(b"fmt ")) > 0:
        rate = int.from_bytes(head[begin + 16 : begin + 20], "little")
    return max(1, round(size / max(LEAST_RATE, rate)))


@contextmanager
def _storing() -> Iterator[None]:
    """Run a block that writes a temporary file.

    Raises:
        ApiError: 507: the disk is full. 503: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ApiError(
                507,
                f"the router's disk for temporary files is full ({error.strerror}); try again, or "
                "set TMPDIR to a folder with more space",
                code="storage_full",
            ) from None
        raise ApiError(
            503,
            f"the router cannot write a temporary file ({error.strerror}); set TMPDIR to a folder "
            "that it can write",
            code="storage_unavailable",
        ) from None
