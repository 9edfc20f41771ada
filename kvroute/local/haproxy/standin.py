"""A second HAProxy stands in for one that was killed until Serve has replaced that: Serve needs
three checks and two new processes for it, which takes 4 s.

kvroute-haproxy runs this beside each HAProxy that it becomes; it ends soon after that one.
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

SUFFIX = ".standin"  # of its configuration
LEAST_S = 1.0  # a HAProxy that ends sooner did not start: another would not either
LONGEST_S = 10.0  # without a replacement: Serve has stopped it on purpose
ADMIN_SOCKET = re.compile(r"^\s*stats socket (\S+).*\n", re.MULTILINE)


def beside(haproxy: int, config: Path, command: Sequence[str]) -> None:
    """Starts this as a process. haproxy: the id of its process. command: what starts another, but
    for its configuration."""
    if os.fork():
        os.wait()
        return
    os.setsid()  # Ray ends whatever is in the group of a process of its own
    if os.fork():  # so that it is no child of HAProxy
        os._exit(0)
    module = [sys.executable, "-m", __name__]
    began_s = f"{time.monotonic()}"  # this program's own start can take a second
    os.execv(sys.executable, [*module, f"{haproxy}", began_s, f"file:{config}", *command])


def running(config: Path) -> int | None:
    """The process that stands in for the HAProxy of this configuration now."""
    with suppress(FileNotFoundError, ProcessLookupError):
        pid = int(_pid_file(config).read_text())
        if os.fsencode(_own(config)) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid
    return None


def main() -> None:
    haproxy, began_s, file, *command = sys.argv[1:]
    try:
        select.select([os.pidfd_open(int(haproxy))], [], [])
    except ProcessLookupError:
        return
    config = Path(file.removeprefix("file:"))
    (admin,) = ADMIN_SOCKET.findall(config.read_text())
    if time.monotonic() - float(began_s) > LEAST_S and not _answers(admin):
        _stand_in(config, command)


def _stand_in(config: Path, command: Sequence[str]) -> None:
    """Until another HAProxy takes over; then it finishes what it has begun."""
    own = _own(config)
    own.write_text(ADMIN_SOCKET.sub("", config.read_text()))
    with subprocess.Popen([*command, "-db", "-f", str(own)]) as stand_in:
        _pid_file(config).write_text(str(stand_in.pid))
        try:
            stand_in.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            stand_in.send_signal(signal.SIGUSR1)


def _own(config: Path) -> Path:
    return config.with_name(f"{config.name}{SUFFIX}")


def _pid_file(config: Path) -> Path:
    return config.with_name(f"{config.name}{SUFFIX}.pid")


def _answers(admin: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(admin) == 0


if __name__ == "__main__":
    main()
