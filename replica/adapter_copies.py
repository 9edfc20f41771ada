"""Copies uploaded adapters from a router to this machine, if it lacks them."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ray import serve

from kvroute.adapters.uploads import FILES, UploadedAdapters

PART_BYTES = 4 << 20  # how much of a file is copied at a time
TRIES = 8  # attempts to read a part; each may reach another router
PART_S = 30.0  # seconds that a router has to answer
RETRY_S = 0.2  # seconds between two attempts

# Returns a part of an adapter's file from some router; None if its machine lacks the file. The
# arguments are digest, name of the file, start and size.
Read = Callable[[str, str, int, int], Awaitable[bytes | None]]


class FromRouters:
    """Reads the files of uploaded adapters from the routers, through Ray Serve."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._routers: Any = None  # Serve's handle of the routers

    async def read(self, digest: str, name: str, start: int, size: int) -> bytes | None:
        """Return a part of a file from some router; None if its machine lacks the file."""
        if self._routers is None:
            self._routers = await asyncio.to_thread(_routers)
        part: bytes | None = await self._routers.adapter_part.remote(
            self._model, digest, name, start, size
        )
        return part


def _routers() -> Any:
    """Return Serve's handle of the routers, which are the entry of this replica's application."""
    return serve.get_app_handle(serve.get_replica_context().app_name)


class AdapterCopies:
    """The uploaded adapters on this machine.

    Args:
        uploads: Their folders.
        read: Reads a part of a file from a router.
    """

    def __init__(self, uploads: UploadedAdapters, read: Read) -> None:
        self._uploads = uploads
        self._read = read
        self._copying = asyncio.Lock()

    async def ensure(self, path: str) -> None:
        """Copy the files of an adapter if it was uploaded, and this machine lacks them.

        Args:
            path: Absolute path of the adapter's folder.

        Raises:
            ValueError: The files cannot be copied.
        """
        digest = self._uploads.digest_in(path)
        if digest is None:
            return
        async with self._copying:
            if await asyncio.to_thread(self._uploads.missing, digest):
                try:
                    await self._copy(digest)
                except OSError as error:
                    raise ValueError(f"its files cannot be written here: {error}") from None

    async def _copy(self, digest: str) -> None:
        async with self._uploads.arriving() as folder:
            for name in FILES:
                await self._copy_file(digest, name, folder / name)
            copied = await asyncio.to_thread(self._uploads.keep, folder)
        if copied != digest:
            raise ValueError("its files have changed on the router's machine; upload them again")

    async def _copy_file(self, digest: str, name: str, to: Path) -> None:
        start = 0
        file = await asyncio.to_thread(to.open, "wb")
        try:
            while part := await self._part(digest, name, start):
                await asyncio.to_thread(file.write, part)
                start += len(part)
        finally:
            await asyncio.to_thread(file.close)

    async def _part(self, digest: str, name: str, start: int) -> bytes:
        reason = "no router has them"
        for _ in range(TRIES):
            try:
                async with asyncio.timeout(PART_S):
                    part = await self._read(digest, name, start, PART_BYTES)
            except Exception as error:  # Ray's errors have many types
                reason = f"a router could not send them ({error!r:.200})"
            else:
                if part is not None:
                    return part
            await asyncio.sleep(RETRY_S)
        raise ValueError(f"its files are not on this machine, and {reason}; upload them again")
