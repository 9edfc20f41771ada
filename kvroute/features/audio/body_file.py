"""Temporary files for the bodies of requests that are too large for memory."""

import asyncio
import tempfile

from kvroute.contract.http_call import PART_BYTES


class BodyFile:
    """A request's body in a temporary file, which is deleted with its process at the latest.

    The file has no name. It is in the folder that the environment variable TMPDIR names.
    """

    def __init__(self) -> None:
        """Create an empty file. Raises OSError."""
        self.size = 0  # bytes, including those that are not written yet
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # `close` closes it
        self._waiting = bytearray()  # bytes to write, less than PART_BYTES

    @property
    def path(self) -> str:
        """Return a path under which this process can open the file while it exists."""
        return f"/proc/self/fd/{self._file.fileno()}"

    async def append(self, data: bytes) -> None:
        """Add bytes at the end. Raises OSError."""
        self.size += len(data)
        self._waiting += data
        if len(self._waiting) >= PART_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write all bytes, so that readers of the file get them. Raises OSError."""
        data, self._waiting = self._waiting, bytearray()
        if data:
            await asyncio.to_thread(self._write, data)

    def _write(self, data: bytearray) -> None:
        rest = memoryview(data)
        while rest:  # a disk that becomes full can take a part of the bytes
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Delete the file. A second call has no effect."""
        self._file.close()
