"""The logs of the last run of a cluster, which outlive the cluster."""

import re
import shutil
import socket
from pathlib import Path

from kvroute.local.progress import Progress
from kvroute.local.running import state_folder
from kvroute.settings.serve import ServeSettings


def cluster_id(host: str, port: int) -> str:
    """Return the default of --cluster: stable over restarts, unique among a host's clusters."""
    return re.sub(r"[^\w.-]", "-", f"{host}-{port}")


def logs_in(folder: Path) -> Path:
    """Return the folder with the logs of a running cluster; `folder` is that of its Ray."""
    return folder / "session_latest" / "logs"


def kept_logs(settings: ServeSettings) -> Path:
    """Return the folder to which the cluster's logs move after the run."""
    cluster = settings.cluster or cluster_id(socket.gethostname(), settings.port)
    return (settings.log_dir or state_folder()) / f"kvroute-logs-{cluster}"


def keep_logs(logs: Path, kept: Path, progress: Progress) -> bool:
    """Move the logs of a run to `kept`, in place of those of the run before.

    Returns:
        False if that is not possible; then the logs stay where they are.
    """
    if not logs.exists():
        return True
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.move(logs.resolve(), kept)
        kept.chmod(0o700)  # Ray makes its folders readable for all users
    except OSError as error:
        progress.fail(f"the logs of this run stay in {logs}: {kept} cannot be written ({error})")
        return False
    progress.say(f"logs of this run: {kept}")
    return True
