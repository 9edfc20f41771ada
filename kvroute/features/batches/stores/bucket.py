"""Files in a bucket of S3, or of a service like it: Google Cloud Storage, Azure, MinIO.

Objects in a bucket cannot grow. So a file to which data is appended is stored as many objects,
NAME/000000000001 and so on. Routers read files through a local copy where they need a path.
"""

import asyncio
import shutil
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import ObjectStore, from_url

from kvroute.features.batches.stores.file_store import CHUNK_BYTES, UNLIMITED

READ_AT_ONCE = 8  # parts of a file that are fetched at the same time


@dataclass(frozen=True, slots=True)
class _Object:
    path: str
    size: int


class Bucket:
    """A FileStore in a bucket."""

    def __init__(self, store: ObjectStore, local: Path) -> None:
        """Create the folder for local copies.

        Args:
            store: the bucket, with a prefix.
            local: folder for local copies of files; other processes do not share it.

        Raises:
            OSError: the folder cannot be created.
        """
        self._store: Any = store
        self._local = local
        shutil.rmtree(local, ignore_errors=True)
        local.mkdir(mode=0o700, parents=True)
        self._users = Counter[str]()  # file -> how many users its local copy has
        self._appended: dict[str, int] = {}  # file -> number of its latest object

    def close(self) -> None:
        shutil.rmtree(self._local, ignore_errors=True)

    async def create(self, name: str, data: bytes) -> bool:
        with _as_os_error():
            try:
                await obstore.put_async(self._store, name, data, mode="create")
            except exceptions.AlreadyExistsError:
                return False
        return True

    async def replace(self, name: str, data: bytes) -> None:
        with _as_os_error():
            await obstore.put_async(self._store, name, data)

    async def append(self, name: str, data: bytes) -> None:
        if name not in self._appended:
            self._appended[name] = len(await self._objects(name))
        self._appended[name] += 1
        with _as_os_error():
            await obstore.put_async(self._store, f"{name}/{self._appended[name]:012}", data)

    async def upload(self, name: str, parts: AsyncIterable[bytes]) -> int:
        counted = _Counted(parts)
        with _as_os_error():
            try:
                await obstore.put_async(self._store, name, counted.chunks())
            except exceptions.BaseError:
                if counted.error:
                    raise counted.error from None
                raise
        return counted.size

    async def read(self, name: str) -> bytes:
        with _as_os_error():
            found = await obstore.get_async(self._store, name)
            return bytes(await found.bytes_async())

    async def chunks(self, name: str, start: int, end: int) -> AsyncIterator[bytes]:
        objects = await self._objects(name)
        if not objects:
            raise FileNotFoundError(name)
        ranges = _ranges(objects, start, end)
        reading = deque[asyncio.Task[bytes]]()
        try:
            while True:
                for path, first, stop in islice(ranges, READ_AT_ONCE - len(reading)):
                    reading.append(asyncio.create_task(self._range(path, first, stop)))
                if not reading:
                    return
                yield await reading[0]
                reading.popleft()
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    async def size(self, name: str) -> int:
        return sum(found.size for found in await self._objects(name))

    async def names(self, folder: str) -> list[str]:
        with _as_os_error():
            listed = await obstore.list_with_delimiter_async(self._store, f"{folder}/")
        paths = [*listed["common_prefixes"], *(found["path"] for found in listed["objects"])]
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    async def delete(self, name: str) -> None:
        self._delete_copy(name)
        for appended in [*self._appended]:
            if f"{appended}/".startswith(f"{name}/"):
                del self._appended[appended]
        with _as_os_error():
            async for listed in obstore.list(self._store, f"{name}/"):
                await obstore.delete_async(self._store, [found["path"] for found in listed])
            with suppress(exceptions.NotFoundError, FileNotFoundError):
                await obstore.delete_async(self._store, name)

    async def path_of(self, name: str) -> Path:
        path, size = self._local / name, await self.size(name)
        self._users[name] += 1
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if size and not (path.exists() and path.stat().st_size == size):
            temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
            with temporary.open("wb") as file:
                async for chunk in self.chunks(name, 0, size):
                    file.write(chunk)
            temporary.replace(path)
        return path

    async def release(self, name: str) -> None:
        self._users[name] -= 1
        if self._users[name] <= 0:
            del self._users[name]
            self._delete_copy(name)

    async def tidy(self) -> None:
        pass  # uploads that were not completed are invisible; the service deletes them by its rules

    async def free_bytes(self) -> int:
        return UNLIMITED

    def used_bytes_now(self) -> int:
        return 0

    def free_bytes_now(self) -> int:
        return UNLIMITED

    def _delete_copy(self, name: str) -> None:
        path = self._local / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    async def _range(self, path: str, start: int, end: int) -> bytes:
        with _as_os_error():
            return bytes(await obstore.get_range_async(self._store, path, start=start, end=end))

    async def _objects(self, name: str) -> list[_Object]:
        """Return the objects of a file in their order; none if there is no such file."""
        with _as_os_error():
            try:
                found = await obstore.head_async(self._store, name)
                return [_Object(name, found["size"])]
            except (exceptions.NotFoundError, FileNotFoundError):
                objects = []
                async for listed in obstore.list(self._store, f"{name}/"):
                    objects += [_Object(found["path"], found["size"]) for found in listed]
                return sorted(objects, key=lambda found: found.path)


def _ranges(objects: Iterable[_Object], start: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Yield the parts of objects, as path, start and end, that make up a range of a file."""
    for found in objects:
        last = min(end, found.size)
        for first in range(max(0, start), last, CHUNK_BYTES):
            yield found.path, first, min(last, first + CHUNK_BYTES)
        start, end = start - found.size, end - found.size


@dataclass
class _Counted:
    """Counts the bytes of an upload's parts, and keeps the error that ended the upload, if any."""

    parts: AsyncIterable[bytes]
    size: int = 0
    error: Exception | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for part in self.parts:
                self.size += len(part)
                yield part
        except Exception as error:
            self.error = error
            raise


def open_bucket(url: str, local: Path) -> Bucket:
    """Return the bucket with this URL, such as s3://bucket/prefix.

    Credentials and the endpoint come from the usual variables, such as AWS_ACCESS_KEY_ID,
    AWS_REGION and AWS_ENDPOINT_URL.

    Raises:
        OSError: the URL or the variables are not valid, or the local folder cannot be created.
    """
    with _as_os_error():
        return Bucket(from_url(url), local)


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except exceptions.NotFoundError as error:
        raise FileNotFoundError(str(error)) from None
    except exceptions.BaseError as error:
        raise OSError(str(error).split("\n")[0][:500]) from None
