"""The first Ctrl-C, SIGTERM or SIGHUP stops in order, the second one at once."""

import os
import signal
import time
from types import FrameType

from kvroute.local.processes import kill_descendants

NOTICE = b"\nstopping; the same again kills everything at once\n"
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal requested a stop. As with KeyboardInterrupt, `except Exception` ignores it."""


class StopSignals:
    """Raises Stopped in the main thread when the first signal arrives.

    Native code may convert it to another exception; then `has_come` shows the signal.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._is_stopping = False
        self.install()

    def install(self) -> None:
        """Sets the signal handlers, again after ray.init(), which replaces SIGTERM's."""
        for number in STOPPING:
            signal.signal(number, self._on_signal)

    def begin_stop(self) -> None:
        """From now on a signal is the second one."""
        self._is_stopping = True

    def sleep(self, seconds: float) -> None:
        """Sleeps; raises Stopped also when the signal's own exception was lost in a callback."""
        time.sleep(seconds)
        if self.has_come:
            raise Stopped

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_stopping:
            kill_descendants()
            os._exit(128 + signal.SIGINT)
        self.has_come = self._is_stopping = True
        os.write(1, NOTICE)  # print() may be the interrupted call
        raise Stopped
