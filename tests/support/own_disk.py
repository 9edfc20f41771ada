"""A cluster with its own small disk at /tmp, for its logs and request logs."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.serving import COMMAND, Cluster

# Root can mount the disk, unless the checkout is in /tmp, which the disk would hide.
CAN_MOUNT = os.geteuid() == 0 and not __file__.startswith("/tmp/")
_MOUNT = "mount -t tmpfs -o size=256m disk /tmp && exec "
ON_OWN_DISK = ("unshare", "--mount", "sh", "-c", _MOUNT + shlex.join(COMMAND) + ' "$@"', "sh")
MB = 1 << 20


def own_disk(cluster: Cluster) -> Path:
    """Return the path of the cluster's /tmp for other processes."""
    return Path(f"/proc/{cluster.process.pid}/root/tmp")


@contextmanager
def full_disk(cluster: Cluster) -> Iterator[None]:
    """Fill the cluster's disk until the end of the context."""
    filling = own_disk(cluster) / "filling"
    with filling.open("wb", buffering=0) as file, suppress(OSError):  # the disk is full
        while file.write(b"x" * MB):
            pass
    try:
        yield
    finally:
        filling.unlink()
