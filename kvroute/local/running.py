"""The clusters that `kvroute serve` runs on this machine: one file each, in the state folder.

Commands read the files to find a cluster without --url.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil

URL = "KVROUTE_URL"  # variable of --url
KEY = "KVROUTE_API_KEY"  # variable with the user's key; no option, as other users can see these


class RunningCluster(msgspec.Struct, frozen=True):
    """A cluster, and the process that ends with it."""

    url: str
    host: str  # name of the machine, as several machines can share a home folder
    pid: int
    started_s: float  # start of the process, as a process id can be used again


def state_folder() -> Path:
    """Return the folder for files that last longer than a run, as the XDG specification has it."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "kvroute"


@contextmanager
def listed(url: str) -> Iterator[None]:
    """Keep the cluster of this process in the list until the block ends.

    A cluster works without the list, so a folder that cannot be written is no error.
    """
    process = psutil.Process()
    cluster = RunningCluster(url, socket.gethostname(), process.pid, process.create_time())
    file = _folder() / f"{cluster.host}-{cluster.pid}.json"
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_bytes(msgspec.json.encode(cluster))
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()


def running_urls() -> list[str]:
    """Return the URLs of the clusters that run on this machine; delete files of ended ones."""
    urls = []
    for file in sorted(_folder().glob(f"{socket.gethostname()}-*.json")):
        with suppress(OSError, msgspec.DecodeError):
            cluster = msgspec.json.decode(file.read_bytes(), type=RunningCluster)
            if _is_running(cluster):
                urls.append(cluster.url)
            else:
                file.unlink()
    return urls


def _folder() -> Path:
    return state_folder() / "clusters"


def _is_running(cluster: RunningCluster) -> bool:
    try:
        return psutil.Process(cluster.pid).create_time() == cluster.started_s
    except psutil.NoSuchProcess:
        return False
