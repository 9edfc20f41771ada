"""Claims separate CPU cores for each engine on a machine. Lock files coordinate the processes."""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kvroute.process.state_folder import state_folder

log = logging.getLogger("kvroute.replica")


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

    If there are too few, or if the lock files cannot be used, claim no core.
    """
    usable = sorted(os.sched_getaffinity(0))
    folder = state_folder() / "cores"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for first in range(0, len(usable) - count + 1, count):
            lock = _lock(folder, f"{count}-{usable[first]}")
            if lock is not None:
                return Cores(tuple(usable[first : first + count]), lock)
    except OSError as error:
        log.warning(
            "the engine has no cores of its own, which makes it slower if others run on this "
            "machine: the lock files in %s cannot be used (%s); set XDG_STATE_HOME to a folder "
            "that can be written",
            folder,
            error,
        )
    return Cores()


def _lock(folder: Path, name: str) -> IO[bytes] | None:
    """Return the lock of some cores; None: another process has it. Raises OSError."""
    # Machines may share the folder. Other users cannot write to it, as they can to /tmp.
    path = folder / f"{socket.gethostname()}-{name}.lock"
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
