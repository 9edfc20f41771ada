"""Compares what a cluster needs with what this machine offers."""

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from kvroute.machine.problem import Problem
from kvroute.process.memory import memory_bytes

SHARED_MEMORY = Path("/dev/shm")
WEIGHTS = "*.safetensors"
LOOKUP_S = 1.0  # seconds in which this machine's own name should be found


def memory(needed: int, free: int | None = None) -> Iterator[Problem]:
    """Yield a problem if less memory is free than the engines on CPUs will take.

    Args:
        needed: bytes for KV caches, weights and host memory of all replicas.
        free: bytes that are free; None: find out.
    """
    free = min(psutil.virtual_memory().available, memory_bytes()) if free is None else free
    if needed > free:
        yield Problem(
            f"the replicas need {needed / 1e9:.1f} GB of memory for weights and KV caches, and "
            f"{free / 1e9:.1f} GB is free; lower --replicas, --kv-cache-memory-mb or "
            "--host-cache-gb, or the kernel may kill a replica"
        )


def weights_bytes(model: str) -> int:
    """Return the size of a model's weights in a local folder; 0 if they are not there."""
    folder = Path(model)
    return sum(file.stat().st_size for file in folder.glob(WEIGHTS)) if folder.is_dir() else 0


def shared_memory(
    object_store: int, host_caches: int, free: int | None = None
) -> Iterator[Problem]:
    """Yield a problem if /dev/shm is too small.

    Args:
        object_store: bytes of Ray's object store.
        host_caches: bytes of the host memory of all replicas.
        free: bytes that are free in /dev/shm; None: find out.
    """
    if free is None:
        free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if object_store + host_caches > free:
        yield Problem(
            f"{SHARED_MEMORY} has {free / 1e9:.2f} GB free, and Ray and --host-cache-gb need "
            f"{(object_store + host_caches) / 1e9:.2f} GB; give the container more, for example "
            "with `docker run --shm-size 1g`, or Ray uses slower files in /tmp and replicas do "
            "not copy blocks from each other"
        )


def connections(possible: int, wanted: int) -> Iterator[Problem]:
    """Yield a problem if the load balancer can hold fewer connections than there are requests.

    Args:
        possible: connections that the limits of files and memory allow.
        wanted: the requests that all routers accept at a time.
    """
    if possible < wanted:
        yield Problem(
            f"the load balancer can hold {possible} connections, and --max-requests lets in "
            f"{wanted} requests; raise the limit of open files (ulimit -Hn), or lower "
            "--max-requests"
        )


def own_name(look_up: Callable[[str], object] = socket.gethostbyname) -> Iterator[Problem]:
    """Yield a problem if this machine's own name is not looked up within LOOKUP_S.

    Ray and vLLM look it up several times while they start. A name that is quickly found to be
    unknown is no problem.

    Args:
        look_up: looks up a name; raises OSError if it is unknown.
    """
    name = socket.gethostname()

    def ask() -> None:
        with suppress(OSError):
            look_up(name)

    asking = threading.Thread(target=ask, name="look-up-own-name", daemon=True)
    asking.start()
    asking.join(LOOKUP_S)
    if asking.is_alive():
        yield Problem(
            f"looking up this machine's own name, {name}, takes longer than {LOOKUP_S:g} s, and "
            "Ray and each engine do it several times while they start; add a line with this "
            f"machine's address and {name} to /etc/hosts, or correct the name servers in "
            "/etc/resolv.conf"
        )
