"""A parent process that ends all processes of the cluster once its child process has ended.

The child process uses Ray. Ray's library aborts it when Ray's head service (GCS) is lost, so only
the parent can still end the other processes.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import psutil

from kvroute.local.head_service import DAEMON, HEAD_SERVICE
from kvroute.local.processes import (
    adopt_orphans,
    die_with_parent,
    end_descendants,
    kill_descendants,
)
from kvroute.local.progress import StartProgress
from kvroute.local.signals import KILLED, STOPPING

# Added to the exit code of a child that has itself said why it ends. Ray's library ends the child
# with exit code 1 if Ray's head service does not answer any more.
EXPLAINED = 64
GRACE_S = 3.0  # seconds from SIGTERM until the remaining processes are killed


def guarded(work: Callable[[], int]) -> int:
    """Run `work` in a child process and return its exit code, or 1 if it was killed.

    Signals to this process are forwarded to the child. Afterwards, all descendants are ended.
    """
    adopt_orphans()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        leave(_run(work))
    _forward_signals(child)
    try:
        ended, status = os.wait()
        while ended != child:  # the ended process was an orphan that this process has adopted
            ended, status = os.wait()
        exit_code = os.waitstatus_to_exitcode(status)
        if EXPLAINED <= exit_code < KILLED:
            return exit_code - EXPLAINED
        if exit_code == KILLED:
            return KILLED
        StartProgress().fail(
            f"the process of kvroute that uses Ray has ended {_cause(exit_code)}; Ray ends it when "
            "Ray's head service does not answer any more, and Linux when the memory is full; the "
            "cluster shuts down; then run kvroute serve again"
        )
        return 1
    finally:
        end_descendants(grace_s=GRACE_S)


def leave(exit_code: int) -> NoReturn:
    """End this child at once; it has said why. Other threads, and Ray, cannot delay the end."""
    os._exit(EXPLAINED + exit_code)


def ray_processes() -> dict[psutil.Process, str]:
    """Return the children of this process without which Ray cannot run, and their names."""
    found = {}
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # another child, which has just ended
            if (name := child.name()) in (HEAD_SERVICE, DAEMON):
                found[child] = name
    return found


def _cause(exit_code: int) -> str:
    """Return how a process has ended, in words."""
    if exit_code >= 0:
        return f"with exit code {exit_code}"
    return f"by the signal {signal.strsignal(-exit_code) or -exit_code}"


def _run(work: Callable[[], int]) -> int:
    os.setpgid(0, 0)  # its own process group, so that it gets Ctrl-C only from the parent
    die_with_parent()
    try:
        return work()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _forward_signals(child: int) -> None:
    def forward(number: int, _frame: FrameType | None) -> None:
        try:
            os.kill(child, number)
        except ProcessLookupError:  # the child has ended, but its descendants may still run
            kill_descendants()

    for number in STOPPING:
        signal.signal(number, forward)
