"""Adapters whose files clients upload to a router."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from kvroute.adapters.added import AdapterFiles
from kvroute.adapters.files import MAX_CONFIG_BYTES, WEIGHTS_FILE, check_files
from kvroute.adapters.uploads import UploadedAdapters
from kvroute.contract.adapters import CONFIG_FILE, RANKS
from kvroute.files.folder import Folder
from kvroute.router.adapters.directory import AdapterDirectory
from kvroute.router.api.errors import ApiError, invalid

MAX_AT_ONCE = 4  # uploads that a router receives at the same time


@dataclass(frozen=True, slots=True)
class UploadedAdapter:
    """An adapter whose files are on the router's machine."""

    path: str  # its folder in --lora-root
    digest: str
    rank: int
    size: int  # bytes of its weights


class AdapterUploads:
    """Receives the files of adapters of one model.

    Args:
        directory: The added adapters of the model.
        root: The folder of --lora-root.
        cluster: The cluster's id.
        model: The model's name.
        max_mb: Limit of an adapter's weights, in MB.
    """

    def __init__(
        self, directory: AdapterDirectory, *, root: Path, cluster: str, model: str, max_mb: int
    ) -> None:
        self.uploads = UploadedAdapters(root, cluster, model)
        self._directory = directory
        self._root = root
        self._max_mb = max_mb
        self._running = 0  # uploads that this router receives now
        self._store: Folder | None = None  # None: nothing was uploaded yet

    async def add(
        self, weights: AsyncIterable[bytes], config: Callable[[], bytes]
    ) -> UploadedAdapter:
        """Store the files of an adapter, and check them as far as the router can.

        Args:
            weights: The content of the file with the weights.
            config: Returns the content of the configuration; called after the weights.

        Raises:
            ApiError: The files are too large or damaged, or too many uploads run.
            OSError: The folder cannot be written.
        """
        if self._running >= MAX_AT_ONCE:
            raise ApiError(429, f"{MAX_AT_ONCE} adapters are being uploaded; try again later")
        self._running += 1
        try:
            await self._tidy()
            async with self.uploads.arriving() as folder:
                return await self._receive(folder, weights, config)
        finally:
            self._running -= 1

    async def read(self, digest: str, name: str, start: int, size: int) -> bytes | None:
        """Return a part of an uploaded file; None if this machine lacks it."""
        return await asyncio.to_thread(self.uploads.read, digest, name, start, size)

    def close(self) -> None:
        if self._store:
            self._store.close()

    async def _receive(
        self, folder: Path, weights: AsyncIterable[bytes], config: Callable[[], bytes]
    ) -> UploadedAdapter:
        if self._store is None:
            self._store = await asyncio.to_thread(Folder, self.uploads.folder)
        size = await self._store.upload(f"{folder.name}/{WEIGHTS_FILE}", self._bounded(weights))
        await self._store.create(f"{folder.name}/{CONFIG_FILE}", config())
        files = await asyncio.to_thread(self._checked, folder)
        digest = await asyncio.to_thread(self.uploads.keep, folder)
        return UploadedAdapter(self.uploads.path_of(digest), digest, files.rank, size)

    async def _bounded(self, weights: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """Yield the weights. Raises ApiError above the limit."""
        size = 0
        async for part in weights:
            size += len(part)
            if size > self._max_mb << 20:
                raise ApiError(
                    413,
                    f"the adapter's weights have more than {self._max_mb} MB; start the cluster "
                    "with a larger --max-adapter-mb, or upload a smaller adapter",
                    param="file",
                )
            yield part

    def _checked(self, folder: Path) -> AdapterFiles:
        """Check the files. Raises ApiError."""
        try:
            return check_files(str(folder), self._root, max_rank=RANKS[-1])
        except ValueError as error:
            raise invalid("file", str(error).replace(f"{folder}/", "")) from None

    async def _tidy(self) -> None:
        """Delete old uploads that no adapter uses, if the adapters are known."""
        if self._directory.is_complete:
            used = {adapter.digest for adapter in self._directory.all}
            await asyncio.to_thread(self.uploads.tidy, used)


def check_config(text: str | None) -> bytes:
    """Return an uploaded configuration. Raises ApiError if it is missing or too long."""
    if not text:
        raise invalid(
            "adapter_config",
            f"the form has no field `adapter_config`; send the text of {CONFIG_FILE} in it",
        )
    data = text.encode()
    if len(data) > MAX_CONFIG_BYTES:
        raise invalid("adapter_config", f"adapter_config has more than {MAX_CONFIG_BYTES:,} bytes")
    return data
