"""No process outlives the one that started it."""

import ctypes
import signal
import time
from collections.abc import Sequence

import psutil

PR_SET_PDEATHSIG = 1  # both from linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)  # loaded now: imports are unsafe after a fork


def adopt_orphans() -> None:
    """From now on, orphaned descendants become children of this process and can be found."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Runs in a child before its program: the kernel will kill it when its parent thread ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_descendants(*, grace_s: float) -> None:
    """Ends all descendants with SIGTERM, and kills those that are left after grace_s."""
    terminated = _descendants()
    for process in terminated:
        _send(process, signal.SIGTERM)
    psutil.wait_procs(terminated, timeout=grace_s)
    kill_descendants()


def kill_descendants(*, deadline_s: float = 5.0, spare: str = "") -> None:
    """Kills all descendants, including new ones, but for those with the name `spare`."""
    deadline = time.monotonic() + deadline_s
    while (left := _descendants(spare)) and time.monotonic() < deadline:
        for process in left:
            _send(process, signal.SIGKILL)
        psutil.wait_procs(left, timeout=0.5)


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _descendants(spare: str = "") -> Sequence[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [each for each in found if not spare or _name(each) != spare]


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # ended by itself
