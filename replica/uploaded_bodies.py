"""Bodies of requests that routers send in parts before the requests, such as recordings."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from kvroute.contract.generation import GenerateRequest
from kvroute.contract.http_call import BodyPart, decode_body_part
from kvroute.process.body_file import BodyFile

# Seconds after the latest part until a body is deleted whose request has not come. A router sends
# the next part as soon as it has an answer.
ABANDONED_S = 60.0
# Space for all bodies, as a multiple of the largest allowed recording.
HELD_LIMITS = 64


class UploadedBodies:
    """One replica's uploaded bodies, in temporary files.

    Args:
        limit_mb: the largest allowed recording in megabytes.
    """

    def __init__(self, *, limit_mb: int) -> None:
        self._limit = HELD_LIMITS * (limit_mb << 20)  # bytes of all bodies
        self._held = 0  # bytes of all bodies, with those of running requests
        self._files: dict[str, BodyFile] = {}  # bodies whose requests have not come, by id
        self._latest_s: dict[str, float] = {}  # id -> time of the latest part

    async def add(self, packed: bytes) -> bytes:
        """Store a part of a body.

        Args:
            packed: An encoded BodyPart.

        Returns:
            Why the replica cannot store it; empty: it is stored.

        Raises:
            ValueError: A part before this one is missing.
        """
        part, now_s = decode_body_part(packed), time.monotonic()
        self._delete_abandoned(now_s)
        if self._held + len(part.data) > self._limit:
            self._delete(part.id)
            return f"the replica holds {self._held >> 20} MB of other requests' bodies".encode()
        try:
            await self._append(part, now_s)
        except OSError as error:
            self._delete(part.id)
            return f"the replica cannot write a temporary file: {error.strerror}".encode()
        return b""

    @contextmanager
    def used_by(self, request: GenerateRequest) -> Iterator[GenerateRequest]:
        """Yield the request with the file of its body, and delete the file afterwards.

        Raises:
            RuntimeError: The body is not here, or is not complete.
        """
        if request.call is None or request.call.upload is None:
            yield request
            return
        upload = request.call.upload
        file = self._files.pop(upload.id, None)
        self._latest_s.pop(upload.id, None)
        try:
            if file is None or file.size != upload.size:
                stored = file.size if file else 0
                raise RuntimeError(f"{stored} of {upload.size} bytes of the body are here")
            call = replace(request.call, upload=replace(upload, path=file.path))
            yield replace(request, call=call)
        finally:
            if file:
                self._held -= file.size
                file.close()

    def close(self) -> None:
        """Delete all bodies whose requests have not come."""
        for id_ in [*self._files]:
            self._delete(id_)

    async def _append(self, part: BodyPart, now_s: float) -> None:
        if part.offset == 0:
            self._delete(part.id)
            self._files[part.id] = BodyFile()
        file = self._files.get(part.id)
        if file is None or file.size != part.offset:
            self._delete(part.id)
            raise ValueError(f"a part of the body before byte {part.offset} is missing")
        self._latest_s[part.id] = now_s
        self._held += len(part.data)
        await file.append(part.data)
        await file.flush()

    def _delete_abandoned(self, now_s: float) -> None:
        for id_, latest_s in [*self._latest_s.items()]:
            if now_s - latest_s > ABANDONED_S:
                self._delete(id_)

    def _delete(self, id_: str) -> None:
        self._latest_s.pop(id_, None)
        if file := self._files.pop(id_, None):
            self._held -= file.size
            file.close()
