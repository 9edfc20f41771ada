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

import psutil

from kvroute.local.head_service import DAEMON, HEAD_SERVICE
from kvroute.local.processes import (
    adopt_orphans,
    die_with_parent,
    end_descendants,
    kill_descendants,
)
from kvroute.local.signals import STOPPING

GRACE_S = 3.0  # seconds from SIGTERM until the remaining processes are killed


def guarded(work: Callable[[], int]) -> int:
    """Run `work` in a child process and return its exit code, or 1 if it was killed.

    Signals to this process are forwarded to the child. Afterwards, all descendants are ended.
    """
    adopt_orphans()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os._exit(_run(work))
    _forward_signals(child)
    try:
        ended, status = os.wait()
        while ended != child:  # the ended process was an orphan that this process has adopted
            ended, status = os.wait()
    finally:
        end_descendants(grace_s=GRACE_S)
    exit_code = os.waitstatus_to_exitcode(status)
    return exit_code if exit_code >= 0 else 1


def ray_processes() -> dict[psutil.Process, str]:
    """Return the children of this process without which Ray cannot run, and their names."""
    found = {}
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # another child, which has just ended
            if (name := child.name()) in (HEAD_SERVICE, DAEMON):
                found[child] = name
    return found


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
