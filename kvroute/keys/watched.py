"""Reads a key file again whenever it changes."""

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvroute.keys.key_file import KeyFileError, read
from kvroute.keys.keyring import Keyring
from kvroute.keys.limits import TenantLimits

log = logging.getLogger("kvroute.keys")

POLL_S = 1.0  # seconds between two checks of the file


class WatchedKeys:
    """The keys in a file. If the file becomes unusable, the keys that were read last stay valid."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises KeyFileError."""
        self._path = path
        self._state = _state(path)
        self._keys = Keyring(read(path))
        self.problem = ""  # why the latest attempt to read the file failed; empty: it succeeded

    def keyring(self) -> Keyring:
        """Return the current keys."""
        return self._keys

    def limits(self, tenant: str) -> TenantLimits | None:
        """Return the current limits of a tenant; None: no limits apply to it."""
        return self._keys.limits(tenant)

    async def run(self) -> None:
        """Check the file for changes until cancelled.

        The checks run in their own thread. So a disk that hangs blocks no other task, and no other
        task delays the checks.
        """
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="keys")
        try:
            while True:
                await asyncio.sleep(POLL_S)
                await loop.run_in_executor(thread, self._read_if_changed)
        finally:
            thread.shutdown(wait=False)

    def _read_if_changed(self) -> None:
        try:
            state = _state(self._path)
            if state == self._state and not self.problem:
                return
            self._keys = Keyring(read(self._path))
        except KeyFileError as error:
            if str(error) != self.problem:
                log.error("the API keys were not updated; the earlier keys stay valid: %s", error)
            self.problem = str(error)
            return
        self._state, self.problem = state, ""
        log.info("the API keys were read from %s", self._path)


def _state(path: Path) -> tuple[int, int, int]:
    """Return values that change whenever the file is written. Raises KeyFileError."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
