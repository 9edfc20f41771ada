"""Claims separate CPU cores for each engine on a machine. Lock files coordinate the processes."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO


class Cores:
    """CPU cores that this process has claimed until it ends.

    A process without claimed cores may use all cores.
    """

    def __init__(self, numbers: tuple[int, ...] = (), lock: IO[bytes] | None = None) -> None:
        self.numbers = numbers
        self._lock = lock  # the kernel releases it when the process ends

    def __len__(self) -> int:
        return len(self.numbers)

    def threads(self, engines: int) -> int:
        """Return the number of threads for each of `engines` engines on these cores."""
        return max(1, len(self) // engines)

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Bind the calling thread to these cores until the end of the context.

        Processes that the thread starts in the context stay bound to these cores.
        """
        before = os.sched_getaffinity(0)
        if self.numbers:
            os.sched_setaffinity(0, self.numbers)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def claim_cores(count: int) -> Cores:
    """Claim `count` neighbouring cores that no other engine has claimed.

    If there are too few, claim no core.
    """
    usable = sorted(os.sched_getaffinity(0))
    for first in range(0, len(usable) - count + 1, count):
        lock = _lock(f"{count}-{usable[first]}")
        if lock is not None:
            return Cores(tuple(usable[first : first + count]), lock)
    return Cores()


def _lock(name: str) -> IO[bytes] | None:
    path = os.path.join(tempfile.gettempdir(), f"kvroute-cores-{os.getuid()}-{name}.lock")
    file = open(path, "wb")  # noqa: SIM115 - held open on purpose
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
