"""The interface of a place for files: a folder, or another kind of storage with the same behaviour.

Names are paths relative to the place, such as `batches/batch_1/run-1.json`. Only this project
chooses them: no part of a name comes from a client.
"""

from collections.abc import AsyncIterable, AsyncIterator
from pathlib import Path
from typing import Protocol

UNLIMITED = 1 << 60  # free bytes of a place that has no limit, such as a bucket
CHUNK_BYTES = 1 << 20  # how much of a file is read or written at a time


class StoreFullError(OSError):
    """There is no space left for what had to be written."""


class FileStore(Protocol):
    """A place for files. All methods raise OSError if the place cannot be used.

    What a method has written stays, even if the machine fails right afterwards.
    """

    async def create(self, name: str, data: bytes) -> bool:
        """Write a new file. Return False, and write nothing, if there is one with this name.

        If several processes create a file with the same name, exactly one of them succeeds.
        """

    async def replace(self, name: str, data: bytes) -> None:
        """Write a file. Readers see either the old content or the new one."""

    async def append(self, name: str, data: bytes) -> None:
        """Add data to the end of a file, which is created if it is missing.

        Only one process may append to a file. If the call fails, a part may have been added.
        """

    async def upload(self, name: str, parts: AsyncIterable[bytes]) -> int:
        """Write a new file from parts that arrive over time; return its size in bytes.

        If this fails, or the parts raise an error, no file is left.
        """

    async def read(self, name: str) -> bytes:
        """Return the content of a small file. Raises FileNotFoundError."""

    def chunks(self, name: str, start: int, end: int) -> AsyncIterator[bytes]:
        """Yield the bytes of a file from `start` to `end`, in parts. Raises FileNotFoundError."""

    async def size(self, name: str) -> int:
        """Return the size of a file in bytes; 0 if there is no such file."""

    async def names(self, folder: str) -> list[str]:
        """Return the names of the files and folders in a folder, without the folder's name."""

    async def delete(self, name: str) -> None:
        """Delete a file, or a folder with all its files. Do nothing if it does not exist."""

    async def path_of(self, name: str) -> Path:
        """Return a path on this machine at which the file can be read.

        The path may be that of a copy, which stays until `release` is called. If there is no such
        file, other processes on this machine can create one at this path.
        """

    async def release(self, name: str) -> None:
        """Say that a path from `path_of` is not used any more. A copy without users is deleted."""

    async def tidy(self) -> None:
        """Delete what crashed processes have left."""

    async def free_bytes(self) -> int:
        """Return how many more bytes can be stored."""
