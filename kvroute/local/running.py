"""The list of clusters that `kvroute serve` runs on this machine: one file for each cluster.

The files are in the state folder. Commands read them to find a cluster if --url is not set.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil

from kvroute.process.state_folder import state_folder

URL = "KVROUTE_URL"  # environment variable for --url
KEY = "KVROUTE_API_KEY"  # variable for the API key, since other users could read an option


# Errors if the folder cannot be used. RuntimeError: this user has no home folder.
UNUSABLE = (OSError, RuntimeError)


class RunningCluster(msgspec.Struct, frozen=True):
    """A running cluster, and the process that runs it."""

    url: str
    host: str  # name of the machine, since several machines can share a home folder
    pid: int  # id of the process
    started_s: float  # start time of the process, since the system reuses process ids


@contextmanager
def registered(url: str) -> Iterator[None]:
    """Keep the cluster of this process in the list until the block ends.

    A cluster also works without the list, so it is no error if the folder cannot be written.
    """
    process = psutil.Process()
    cluster = RunningCluster(url, socket.gethostname(), process.pid, process.create_time())
    file = Path()
    with suppress(*UNUSABLE):
        file = _folder() / f"{cluster.host}-{cluster.pid}.json"
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_bytes(msgspec.json.encode(cluster))
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()


def running_urls() -> list[str]:
    """Return the URLs of the clusters on this machine; delete the files of ended clusters.

    If the folder cannot be read, no cluster is known.
    """
    urls, files = list[str](), list[Path]()
    with suppress(*UNUSABLE):
        files = sorted(_folder().glob(f"{socket.gethostname()}-*.json"))
    for file in files:
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
