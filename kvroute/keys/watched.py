"""A file of keys that is read again when it changes."""

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvroute.keys.key_file import KeyFileError, read
from kvroute.keys.keyring import Keyring
from kvroute.keys.limits import TenantLimits

log = logging.getLogger("kvroute.keys")

POLL_S = 1.0  # between two looks at the file


class WatchedKeys:
    """The keys of a file. While it cannot be read, those that it had stay valid."""

    def __init__(self, path: Path) -> None:
        """Raises KeyFileError."""
        self._path = path
        self._seen = _state(path)
        self._keys = Keyring(read(path))
        self.problem = ""  # why it cannot be read now; empty: it can

    def keyring(self) -> Keyring:
        """The one of now."""
        return self._keys

    def limits(self, tenant: str) -> TenantLimits | None:
        """What the tenant may take now; None: it has no limits."""
        return self._keys.limits(tenant)

    async def run(self) -> None:
        """Follows the file until cancelled. A disk that hangs stops nobody else, and nobody else
        stops this: it has a thread of its own."""
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="keys")
        try:
            while True:
                await asyncio.sleep(POLL_S)
                await loop.run_in_executor(thread, self._look)
        finally:
            thread.shutdown(wait=False)

    def _look(self) -> None:
        try:
            state = _state(self._path)
            if state == self._seen and not self.problem:
                return
            self._keys = Keyring(read(self._path))
        except KeyFileError as error:
            if str(error) != self.problem:
                log.error("the API keys stay as they were: %s", error)
            self.problem = str(error)
            return
        self._seen, self.problem = state, ""
        log.info("the API keys were read from %s", self._path)


def _state(path: Path) -> tuple[int, int, int]:
    """What differs once the file was written. KeyFileError."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from None
    return found.st_mtime_ns, found.st_size, found.st_ino
