"""Files in a folder of a disk. Several machines can share it through a network file system."""

import asyncio
import errno
import os
import shutil
import threading
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from kvroute.features.batches.stores.file_store import CHUNK_BYTES, StoreFullError

THREADS = 8  # threads that call the operating system; each may hang with the disk
MODE = 0o600  # only the user who runs kvroute can read the files
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # flags that open a new file
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # errors of a full disk and of an exceeded quota
UPLOADS = "uploads"  # folder of files that are not complete yet
# An incomplete file that has not grown for this many seconds belongs to a process that has crashed.
STALE_S = 86_400

T = TypeVar("T")


class _OpenFile:
    """An open file. It must be closed, since the space of a deleted file is free only then.

    A call that was cancelled may still use the file in its thread. If the file were closed while
    the call runs, the call could write into another file that got the same descriptor. So the end
    of the call closes the file then.
    """

    def __init__(self, path: Path, flags: int) -> None:
        self._descriptor = os.open(path, flags, MODE)
        self._lock = threading.Lock()  # is held while the file is used
        self._is_closing = False

    def __del__(self) -> None:
        with suppress(AttributeError):  # it could not be opened
            self.close()

    def close(self) -> None:
        """Close the file, or let the call that uses it now close it at its end."""
        self._is_closing = True
        if self._descriptor >= 0 and self._lock.acquire(blocking=False):
            descriptor, self._descriptor = self._descriptor, -1
            self._lock.release()
            if descriptor >= 0:
                os.close(descriptor)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        with self._used() as descriptor:
            while view:
                view = view[os.write(descriptor, view) :]

    def read(self, size: int, start: int) -> bytes:
        with self._used() as descriptor:
            return os.pread(descriptor, size, start)

    def sync(self) -> None:
        """Wait until the content is on the disk."""
        with self._used() as descriptor:
            os.fsync(descriptor)

    @contextmanager
    def _used(self) -> Iterator[int]:
        try:
            with self._lock:
                yield self._descriptor
        finally:
            if self._is_closing:
                self.close()


class Folder:
    """A FileStore in a folder. It has its own threads, in which it calls the operating system.

    So a disk that hangs stops only what needs this folder.
    """

    def __init__(self, root: Path) -> None:
        """Create the folder if it is missing. Raises OSError."""
        self.root = root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        (root / UPLOADS).mkdir(mode=0o700, exist_ok=True)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="files")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def create(self, name: str, data: bytes) -> bool:
        return await self._run(self._create, name, data)

    async def replace(self, name: str, data: bytes) -> None:
        await self._run(self._replace, name, data)

    async def append(self, name: str, data: bytes) -> None:
        await self._run(self._append, name, data)

    async def upload(self, name: str, parts: AsyncIterable[bytes]) -> int:
        temporary, size = self.root / UPLOADS / uuid.uuid4().hex, 0
        try:
            file = await self._run(_OpenFile, temporary, NEW)
            with self._closing(file):
                async for part in parts:
                    await self._run(file.write, part)
                    size += len(part)
                await self._run(self._publish, file, temporary, name)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        return size

    async def read(self, name: str) -> bytes:
        return await self._run((self.root / name).read_bytes)

    async def chunks(self, name: str, start: int, end: int) -> AsyncIterator[bytes]:
        file = await self._run(_OpenFile, self.root / name, os.O_RDONLY)
        with self._closing(file):
            while start < end:
                data = await self._run(file.read, min(CHUNK_BYTES, end - start), start)
                if not data:
                    return
                start += len(data)
                yield data

    async def size(self, name: str) -> int:
        return await self._run(self._size, name)

    async def names(self, folder: str) -> list[str]:
        return await self._run(self._names, folder)

    async def delete(self, name: str) -> None:
        await self._run(self._delete, name)

    async def path_of(self, name: str) -> Path:
        return self.root / name

    async def release(self, name: str) -> None:
        pass  # there is no copy

    async def tidy(self) -> None:
        await self._run(self._delete_stale)

    async def free_bytes(self) -> int:
        return await self._run(self.free_bytes_now)

    def used_bytes_now(self) -> int:
        """Return the size of all files in the folder. This waits for the disk.

        Files that other routers delete meanwhile do not count.
        """
        used_bytes = 0
        for folder, _, names in os.walk(self.root):  # passes over folders that disappear
            for name in names:
                with suppress(FileNotFoundError):
                    used_bytes += os.lstat(os.path.join(folder, name)).st_size
        return used_bytes

    def free_bytes_now(self) -> int:
        """Return how many more bytes the disk can store. This waits for the disk."""
        return shutil.disk_usage(self.root).free

    @contextmanager
    def _closing(self, file: _OpenFile) -> Iterator[None]:
        """Close a file at the end of a block, in a thread, since this may wait for the disk."""
        try:
            yield
        finally:
            with suppress(RuntimeError):  # the folder is closed; then nothing else uses the file
                self._threads.submit(file.close)

    async def _run(self, call: Callable[..., T], *arguments: object) -> T:
        with _full_as_error():
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, call, *arguments)

    def _create(self, name: str, data: bytes) -> bool:
        temporary = self._written(data)
        path = self._path_for(name)
        try:
            os.link(temporary, path)  # fails if there is a file already, also on network disks
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        _sync_folder(path.parent)
        return True

    def _replace(self, name: str, data: bytes) -> None:
        self._rename(self._written(data), name)

    def _append(self, name: str, data: bytes) -> None:
        file = _OpenFile(self._path_for(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with closing(file):
            file.write(data)
            file.sync()

    def _written(self, data: bytes) -> Path:
        """Write a temporary file, and return its path."""
        path = self.root / UPLOADS / uuid.uuid4().hex
        file = _OpenFile(path, NEW)
        try:
            with closing(file):
                file.write(data)
                file.sync()
        except BaseException:
            os.unlink(path)
            raise
        return path

    def _publish(self, file: _OpenFile, temporary: Path, name: str) -> None:
        """Give a complete temporary file its name."""
        file.sync()
        self._rename(temporary, name)

    def _rename(self, temporary: Path, name: str) -> None:
        path = self._path_for(name)
        os.replace(temporary, path)
        _sync_folder(path.parent)

    def _path_for(self, name: str) -> Path:
        """Return the path of a file to write; create its folder if it is missing."""
        path = self.root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def _size(self, name: str) -> int:
        with suppress(FileNotFoundError):
            return os.stat(self.root / name).st_size
        return 0

    def _names(self, folder: str) -> list[str]:
        with suppress(FileNotFoundError):
            return os.listdir(self.root / folder)
        return []

    def _delete_stale(self) -> None:
        limit_s = time.time() - STALE_S
        for path in (self.root / UPLOADS).iterdir():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < limit_s:
                    path.unlink()

    def _delete(self, name: str) -> None:
        path = self.root / name
        with suppress(FileNotFoundError):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _full_as_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise StoreFullError(error.errno, error.strerror) from None
        raise
