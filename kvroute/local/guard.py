"""Ray's library aborts its process when Ray's head service (GCS) is lost, so it runs in a child:
whatever becomes of that, this process ends all that was started."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType

import psutil

from kvroute.local.head_service import HEAD_SERVICE
from kvroute.local.processes import (
    adopt_orphans,
    die_with_parent,
    end_descendants,
    kill_descendants,
)
from kvroute.local.signals import STOPPING

GRACE_S = 3.0  # for processes that remain after the orderly stop


def guarded(work: Callable[[], int]) -> int:
    """Runs this in a child process, which gets this one's signals, and returns its exit code, or 1
    when it was killed. No process that it started is left."""
    adopt_orphans()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os._exit(_run(work))
    _pass_signals_on(child)
    try:
        ended, status = os.wait()
        while ended != child:  # an orphan that became this process's
            ended, status = os.wait()
    finally:
        end_descendants(grace_s=GRACE_S)
    exit_code = os.waitstatus_to_exitcode(status)
    return exit_code if exit_code >= 0 else 1


def head_service() -> psutil.Process:
    """The process of Ray's head service, which this process has started."""
    return next(each for each in psutil.Process().children() if each.name() == HEAD_SERVICE)


def _run(work: Callable[[], int]) -> int:
    os.setpgid(0, 0)  # a terminal's Ctrl-C comes through the parent only, and once
    die_with_parent()
    try:
        return work()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _pass_signals_on(child: int) -> None:
    def pass_on(number: int, _frame: FrameType | None) -> None:
        try:
            os.kill(child, number)
        except ProcessLookupError:  # it has ended, and what it left is being ended
            kill_descendants()

    for number in STOPPING:
        signal.signal(number, pass_on)
