"""Forms with recordings in a replica, which gets them from routers in parts before the requests."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from msgspec.msgpack import decode
from msgspec.structs import replace

from kvroute.contract.generation import GenerateRequest
from kvroute.features.audio.body_file import BodyFile
from kvroute.features.replica_feature import Method, ReplicaFeature

# Seconds after the latest part until a body is deleted whose request has not come. A router sends
# the next part as soon as it has an answer.
ABANDONED_S = 60.0
# Space for all bodies, as a multiple of the largest allowed recording.
HELD_LIMITS = 64

# Part of a body: the upload's id, the number of bytes before this part, and its bytes.
BodyPart = tuple[str, int, bytes]


class UploadedBodies(ReplicaFeature):
    """One replica's uploaded bodies, in temporary files.

    Args:
        limit_mb: the largest allowed recording in megabytes.
        refusal: returns why the replica refuses requests now; empty: it accepts them.
    """

    name = "audio"

    def __init__(self, *, limit_mb: int, refusal: Callable[[], str] = lambda: "") -> None:
        self._refusal = refusal
        self._limit = HELD_LIMITS * (limit_mb << 20)  # bytes of all bodies
        self._held = 0  # bytes of all bodies, with those of running requests
        self._files: dict[str, BodyFile] = {}  # bodies whose requests have not come, by id
        self._latest_s: dict[str, float] = {}  # id -> time of the latest part

    def tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"uploads": self._run()}

    def methods(self) -> Mapping[str, Method]:
        return {"upload": self.upload}

    @asynccontextmanager
    async def around(self, request: GenerateRequest, data: bytes) -> AsyncIterator[GenerateRequest]:
        """Yield the request with the file of its body, and delete the file afterwards.

        Raises:
            RuntimeError: The body is not here, or is not complete.
        """
        assert request.call
        upload = request.call.upload
        assert upload
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

    async def upload(self, packed: bytes, rank: int) -> bytes:
        """Store a part of the body of a request that will come.

        Args:
            packed: A BodyPart in MessagePack.
            rank: Not used, since all ranks share the bodies.

        Returns:
            Why the replica takes neither the part nor the request; empty: the part is stored.

        Raises:
            ValueError: A part before this one is missing.
        """
        if refusal := self._refusal():
            return refusal.encode()
        id_, offset, data = decode(packed, type=BodyPart)
        if self._held + len(data) > self._limit:
            self._delete(id_)
            return f"the replica holds {self._held >> 20} MB of other requests' bodies".encode()
        try:
            await self._append(id_, offset, data)
        except OSError as error:
            self._delete(id_)
            return f"the replica cannot write a temporary file: {error.strerror}".encode()
        return b""

    async def _run(self) -> None:
        """Delete bodies whose requests do not come; when the replica ends, all of them."""
        try:
            while True:
                await asyncio.sleep(ABANDONED_S)
                now_s = time.monotonic()
                for id_, latest_s in [*self._latest_s.items()]:
                    if now_s - latest_s > ABANDONED_S:
                        self._delete(id_)
        finally:
            for id_ in [*self._files]:
                self._delete(id_)

    async def _append(self, id_: str, offset: int, data: bytes) -> None:
        if offset == 0:
            self._delete(id_)
            self._files[id_] = BodyFile()
        file = self._files.get(id_)
        if file is None or file.size != offset:
            self._delete(id_)
            raise ValueError(f"a part of the body before byte {offset} is missing")
        self._latest_s[id_] = time.monotonic()
        self._held += len(data)
        await file.append(data)
        await file.flush()

    def _delete(self, id_: str) -> None:
        self._latest_s.pop(id_, None)
        if file := self._files.pop(id_, None):
            self._held -= file.size
            file.close()
