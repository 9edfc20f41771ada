"""A cluster whose /tmp, with its logs and request logs, is a small disk of its own."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.serving import COMMAND, Cluster

# Root can mount a disk, unless that would hide this program.
CAN_MOUNT = os.geteuid() == 0 and not __file__.startswith("/tmp/")
_MOUNT = "mount -t tmpfs -o size=256m disk /tmp && exec "
ON_OWN_DISK = ("unshare", "--mount", "sh", "-c", _MOUNT + shlex.join(COMMAND) + ' "$@"', "sh")
MB = 1 << 20


def own_disk(cluster: Cluster) -> Path:
    """That /tmp, as other processes see it."""
    return Path(f"/proc/{cluster.process.pid}/root/tmp")


@contextmanager
def full_disk(cluster: Cluster) -> Iterator[None]:
    """Nothing can be written there until the block ends."""
    filling = own_disk(cluster) / "filling"
    with filling.open("wb", buffering=0) as file, suppress(OSError):  # there is no more space
        while file.write(b"x" * MB):
            pass
    try:
        yield
    finally:
        filling.unlink()
