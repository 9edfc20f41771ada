"""Signals: the first SIGINT, SIGTERM or SIGHUP stops the cluster, the second kills it at once."""

import os
import signal
import time
from types import FrameType

from kvroute.local.processes import kill_descendants

# Printed when the first signal arrives.
NOTICE = b"\nstopping; press Ctrl-C again to kill everything at once\n"
KILLING = b"\nkilling everything\n"  # printed when the second signal arrives
KILLED = 128 + signal.SIGINT  # exit code after the second signal
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the signals that stop the cluster


class Stopped(BaseException):
    """A signal requested a stop. Like KeyboardInterrupt, `except Exception` does not catch it."""


class StopSignals:
    """Raises Stopped in the main thread when the first signal arrives.

    Native code may lose or replace that exception. So `was_received` shows the signal in any case.
    """

    def __init__(self) -> None:
        self.was_received = False
        self._is_stopping = False
        self.install()

    def install(self) -> None:
        """Install the signal handlers; needed again after ray.init(), which replaces SIGTERM's."""
        for number in STOPPING:
            signal.signal(number, self._on_signal)

    def kill_on_next_signal(self) -> None:
        """Make the next signal kill everything at once, even if it is the first one."""
        self._is_stopping = True

    def sleep(self, seconds: float) -> None:
        """Sleep, then raise Stopped if a signal has arrived, even if its exception was lost."""
        time.sleep(seconds)
        if self.was_received:
            raise Stopped

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_stopping:
            os.write(1, KILLING)
            _silence()
            kill_descendants()
            os._exit(KILLED)
        self.was_received = self._is_stopping = True
        os.write(1, NOTICE)  # not print(), since the signal may have interrupted a print()
        raise Stopped


def _silence() -> None:
    """Drop what this process prints from now on.

    Other threads, and Ray's library, would report each process that is killed on purpose.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)
