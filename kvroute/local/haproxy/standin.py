"""Runs a temporary HAProxy (a stand-in) after the cluster's HAProxy was killed.

Serve takes 4 s to replace a killed HAProxy: three failed health checks, and two starts. So
wrapper.py starts this module as a process beside each HAProxy. The process waits until its HAProxy
ends, and then runs a stand-in until Serve's replacement is ready.
"""

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SUFFIX = ".standin"  # name of the stand-in's configuration: HAProxy's file name with this suffix
MIN_S = 1.0  # seconds; a HAProxy that ends sooner could not start, and neither could a stand-in
# Seconds after which a stand-in ends. If Serve has not replaced HAProxy by then, Serve has stopped.
MAX_RUN_S = 10.0
# The line of HAProxy's configuration that sets the path of the admin socket.
ADMIN_SOCKET = re.compile(r"^\s*stats socket (\S+).*\n", re.MULTILINE)


def watch(haproxy: int, config: Path, command: Sequence[str]) -> None:
    """Start this module as a process that watches a HAProxy.

    Args:
        haproxy: Process id of the HAProxy to watch.
        config: Configuration file of that HAProxy.
        command: Command that starts a stand-in, without the option for the configuration.
    """
    if os.fork():
        os.wait()
        return
    os.setsid()  # leave HAProxy's process group, because Ray kills that group
    if os.fork():  # the second fork, so that the new process is not a child of HAProxy
        os._exit(0)
    module = [sys.executable, "-m", __name__]
    start_s = f"{time.monotonic()}"  # measured here, since the start of Python can take a second
    os.execv(sys.executable, [*module, f"{haproxy}", start_s, f"file:{config}", *command])


def running(config: Path) -> int | None:
    """Return the process id of the running stand-in for this configuration, or None."""
    with suppress(FileNotFoundError, ProcessLookupError):
        pid = int(_pid_file(config).read_text())
        if os.fsencode(_own_config(config)) in Path(f"/proc/{pid}/cmdline").read_bytes().split(
            b"\0"
        ):
            return pid
    return None


def main() -> None:
    """Wait until the watched HAProxy ends, then run a stand-in if there is no replacement."""
    haproxy, start_s, file, *command = sys.argv[1:]
    try:
        select.select([os.pidfd_open(int(haproxy))], [], [])
    except ProcessLookupError:
        return
    config = Path(file.removeprefix("file:"))
    (admin,) = ADMIN_SOCKET.findall(config.read_text())
    if time.monotonic() - float(start_s) > MIN_S and not _answers(admin):
        _stand_in(config, command)


def _stand_in(config: Path, command: Sequence[str]) -> None:
    """Run a stand-in until it ends. After MAX_RUN_S, tell it to finish its requests and end."""
    own = _own_config(config)
    own.write_text(ADMIN_SOCKET.sub("", config.read_text()))
    with subprocess.Popen([*command, "-db", "-f", str(own)]) as stand_in:
        _pid_file(config).write_text(str(stand_in.pid))
        try:
            stand_in.wait(MAX_RUN_S)
        except subprocess.TimeoutExpired:
            stand_in.send_signal(signal.SIGUSR1)


def _own_config(config: Path) -> Path:
    return config.with_name(f"{config.name}{SUFFIX}")


def _pid_file(config: Path) -> Path:
    return config.with_name(f"{config.name}{SUFFIX}.pid")


def _answers(admin: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(admin) == 0


if __name__ == "__main__":
    main()
