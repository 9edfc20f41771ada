"""Keeps the logs of a cluster's last run after the cluster has stopped."""

import re
import shutil
import socket
from pathlib import Path

from kvroute.local.progress import StartProgress
from kvroute.process.state_folder import state_folder
from kvroute.settings.serve import ServeSettings


def cluster_id(host: str, port: int) -> str:
    """Return the default of --cluster: equal after a restart, unique among a host's clusters."""
    return re.sub(r"[^\w.-]", "-", f"{host}-{port}")


def logs_in(folder: Path) -> Path:
    """Return the folder of a running cluster's logs, which is inside Ray's folder `folder`."""
    return folder / "session_latest" / "logs"


def kept_logs(settings: ServeSettings) -> Path:
    """Return the folder to which the cluster's logs are moved after a run."""
    cluster = settings.cluster or cluster_id(socket.gethostname(), settings.port)
    return (settings.log_dir or state_folder()) / f"kvroute-logs-{cluster}"


def keep_logs(logs: Path, target: Path, progress: StartProgress) -> bool:
    """Move the logs of a run to the folder `target`, and delete the logs of the previous run there.

    Returns:
        True, or False if `target` cannot be written. Then the logs stay where they are.
    """
    if not logs.exists():
        return True
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(logs.resolve(), target)
        target.chmod(0o700)  # Ray makes its folders readable to all users
    except OSError as error:
        progress.fail(f"the logs of this run stay in {logs}: {target} cannot be written ({error})")
        return False
    progress.say(f"logs of this run: {target}")
    return True
