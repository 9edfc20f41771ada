"""Restarts Ray's head service (GCS) when it dies: `python -m kvroute.local.head_service`.

Ray's daemons and workers can run without the service for a minute, and serve requests meanwhile.
deploy/node.sh makes the service store its state on the head node's disk, so that the restarted
service has the earlier state.
"""

import os
import subprocess
import time
from pathlib import Path

import psutil

from kvroute.local.processes import is_alive

HEAD_SERVICE = "gcs_server"  # name of the head service's process
DAEMON = "raylet"  # name of the process of Ray's daemon, which ends when Ray is stopped
CHECK_INTERVAL_S = 0.25  # seconds between two checks of the service
# Seconds between the service's end and its restart. `ray stop` ends the daemon, too, within this
# time. Then the service is not restarted.
PAUSE_S = 1.0


def main() -> None:
    """Restart the head service whenever it dies, and return when Ray is stopped."""
    service, daemon = _running(HEAD_SERVICE), _running(DAEMON)
    command, folder, environment = service.cmdline(), service.cwd(), service.environ()
    outputs = [os.readlink(f"/proc/{service.pid}/fd/{number}") for number in (1, 2)]
    while is_alive(daemon):
        if is_alive(service):
            time.sleep(CHECK_INTERVAL_S)
            continue
        time.sleep(PAUSE_S)
        if is_alive(daemon):
            print(f"{HEAD_SERVICE} has died; restarting it", flush=True)
            service = _start(command, folder, environment, outputs)
    if is_alive(service):
        service.terminate()


def _running(name: str) -> psutil.Process:
    """Return this user's most recently started process with this name."""
    return max(
        (
            process
            for process in psutil.process_iter()
            if process.name() == name and process.uids().effective == os.geteuid()
        ),
        key=psutil.Process.create_time,
    )


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
