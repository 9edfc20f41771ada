"""Ray's head service (GCS) starts again when it dies: `python -m kvroute.local.head_service`.

Ray's daemons and workers go on without it for a minute. It comes back with all that it knew, since
deploy/node.sh lets it keep that on the head's disk, so answers go on and so do later requests.
"""

import os
import subprocess
import time
from pathlib import Path

import psutil

from kvroute.local.processes import is_alive

HEAD_SERVICE = "gcs_server"
DAEMON = "raylet"  # Ray's other process on a head, which ends with Ray
CHECK_INTERVAL_S = 0.25
PAUSE_S = 1.0  # `ray stop` ends the daemon first; between two starts


def main() -> None:
    """On a head, after `ray start`; returns when Ray is stopped."""
    service, daemon = _running(HEAD_SERVICE), _running(DAEMON)
    command, folder, environment = service.cmdline(), service.cwd(), service.environ()
    outputs = [os.readlink(f"/proc/{service.pid}/fd/{number}") for number in (1, 2)]
    while is_alive(daemon):
        if is_alive(service):
            time.sleep(CHECK_INTERVAL_S)
            continue
        time.sleep(PAUSE_S)
        if is_alive(daemon):
            print(f"{HEAD_SERVICE} has died; starting it again", flush=True)
            service = _start(command, folder, environment, outputs)
    if is_alive(service):
        service.terminate()


def _running(name: str) -> psutil.Process:
    """This user's youngest process of that name."""
    mine = [each for each in psutil.process_iter() if each.name() == name and _is_mine(each)]
    return max(mine, key=psutil.Process.create_time)


def _is_mine(process: psutil.Process) -> bool:
    return process.uids().effective == os.geteuid()


def _start(
    command: list[str], folder: str, environment: dict[str, str], outputs: list[str]
) -> psutil.Process:
    out, err = map(Path, outputs)
    with out.open("ab") as stdout, err.open("ab") as stderr:
        return psutil.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


if __name__ == "__main__":
    main()
