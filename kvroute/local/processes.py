"""Ends child processes, so that no child outlives the process that started it."""

import ctypes
import signal
import time
from collections.abc import Sequence

import psutil

PR_SET_PDEATHSIG = 1  # the numbers of these two operations are from linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)  # loaded at import, since loading is unsafe after a fork


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of each descendant whose own parent has ended.

    Otherwise _descendants() would no longer find such a process.
    """
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_descendants(*, grace_s: float) -> None:
    """End all descendants with SIGTERM; kill those that still run after `grace_s`."""
    terminated = _descendants()
    for process in terminated:
        _send(process, signal.SIGTERM)
    psutil.wait_procs(terminated, timeout=grace_s)
    kill_descendants()


def kill_descendants(*, deadline_s: float = 5.0, spare: str = "") -> None:
    """Kill all descendants, and those that they start meanwhile, for up to `deadline_s`.

    Processes with the name `spare` are not killed.
    """
    deadline = time.monotonic() + deadline_s
    while (left := _descendants(spare)) and time.monotonic() < deadline:
        for process in left:
            _send(process, signal.SIGKILL)
        psutil.wait_procs(left, timeout=0.5)


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs; a zombie does not run."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _descendants(spare: str = "") -> Sequence[psutil.Process]:
    descendants = psutil.Process().children(recursive=True)
    return [process for process in descendants if not spare or _name(process) != spare]


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # the process has ended by itself
