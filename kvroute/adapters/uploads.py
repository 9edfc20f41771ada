"""Adapters whose files were uploaded: their folders in --lora-root, on each machine.

A router writes the files, and gives the folder the digest of the files as its name. A replica on a
machine that lacks the folder copies it from a router. A folder that no added adapter uses is
deleted when it is an hour old.
"""

import asyncio
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

from kvroute.adapters.files import WEIGHTS_FILE, digest_of
from kvroute.contract.adapters import CONFIG_FILE

FILES = (CONFIG_FILE, WEIGHTS_FILE)  # the files of an uploaded adapter
UPLOADED = "uploaded"  # the folder in --lora-root
UNUSED_S = 3600.0  # age in seconds at which a folder that no adapter uses is deleted


class UploadedAdapters:
    """The uploaded adapters of one model, on this machine. Most methods wait for the disk.

    Args:
        root: The folder of --lora-root.
        cluster: The cluster's id.
        model: The model's name.
    """

    def __init__(self, root: Path, cluster: str, model: str) -> None:
        self.name = f"{UPLOADED}/{quote(cluster, safe='')}/{quote(model, safe='')}"
        self.folder = root / self.name

    def path_of(self, digest: str) -> str:
        """Return the path of an adapter's folder in --lora-root."""
        return f"{self.name}/{digest}"

    def digest_in(self, path: str) -> str | None:
        """Return the digest of the uploaded adapter in a folder; None if it was not uploaded.

        Args:
            path: absolute path of the folder.
        """
        folder = Path(path)
        return folder.name if folder.parent == self.folder else None

    def missing(self, digest: str) -> bool:
        """Return whether this machine lacks an uploaded adapter."""
        return not all((self.folder / digest / name).is_file() for name in FILES)

    @asynccontextmanager
    async def arriving(self) -> AsyncIterator[Path]:
        """Create a folder for files that arrive; delete it at the end, unless `keep` renamed it.

        Raises:
            OSError: the folder cannot be created.
        """
        folder = self.folder / f"{uuid.uuid4().hex}.part"
        await asyncio.to_thread(folder.mkdir, parents=True, mode=0o755)
        try:
            yield folder
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    def keep(self, folder: Path) -> str:
        """Give a folder with complete files its name, and return their digest. Raises OSError."""
        digest = digest_of(folder)
        final = self.folder / digest
        try:
            folder.rename(final)
        except OSError:  # the adapter is there already
            if self.missing(digest):
                raise
            final.touch()  # it was uploaded now
        return digest

    def read(self, digest: str, name: str, start: int, size: int) -> bytes | None:
        """Return a part of a file, empty after its end; None if this machine lacks the file."""
        if name not in FILES or not digest.isalnum():
            return None
        try:
            with (self.folder / digest / name).open("rb") as file:
                file.seek(start)
                return file.read(size)
        except FileNotFoundError:
            return None

    def tidy(self, used: Collection[str]) -> None:
        """Delete what no adapter has used for an hour.

        Args:
            used: Digests of the adapters' files that are needed.
        """
        if not self.folder.is_dir():
            return
        for folder in self.folder.iterdir():
            if folder.name not in used and time.time() - folder.stat().st_mtime > UNUSED_S:
                shutil.rmtree(folder, ignore_errors=True)
