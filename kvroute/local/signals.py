"""The first SIGINT, SIGTERM or SIGHUP stops the cluster in order; the second kills it at once."""

import os
import signal
import time
from types import FrameType

from kvroute.local.processes import kill_descendants

NOTICE = b"\nstopping; a second Ctrl-C or signal kills everything at once\n"
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal requested a stop. Like KeyboardInterrupt, it passes `except Exception`."""


class StopSignals:
    """Raises Stopped in the main thread when the first signal arrives.

    Native code may replace that exception by another one; `was_received` is True in any case.
    """

    def __init__(self) -> None:
        self.was_received = False
        self._is_stopping = False
        self.install()

    def install(self) -> None:
        """Install the signal handlers; needed again after ray.init(), which replaces SIGTERM's."""
        for number in STOPPING:
            signal.signal(number, self._on_signal)

    def begin_stop(self) -> None:
        """Let the next signal kill everything, as a second one would."""
        self._is_stopping = True

    def sleep(self, seconds: float) -> None:
        """Sleep, then raise Stopped if a signal arrived whose exception was lost in a callback."""
        time.sleep(seconds)
        if self.was_received:
            raise Stopped

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_stopping:
            kill_descendants()
            os._exit(128 + signal.SIGINT)
        self.was_received = self._is_stopping = True
        os.write(1, NOTICE)  # print() may be the interrupted call
        raise Stopped
