"""The first Ctrl-C, SIGTERM or hang-up stops us in order, a second one at once."""

import os
import signal
import time
from types import FrameType

from router.command.processes import kill_descendants

NOTICE = b"\nstopping; the same again kills everything at once\n"
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """Somebody asked us to stop. Like KeyboardInterrupt, no `except Exception` takes it."""


class StopSignals:
    """Raises Stopped in the main thread, wherever it is, when the first signal arrives.

    Code that is not Python may turn that into another exception: `has_come` tells.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._is_stopping = False
        self.install()

    def install(self) -> None:
        """Takes the signals (back) from whoever has them; ray.init() takes SIGTERM."""
        for number in STOPPING:
            signal.signal(number, self._on_signal)

    def begin_stop(self) -> None:
        """From now on a signal is the second one."""
        self._is_stopping = True

    def sleep(self, seconds: float) -> None:
        """Sleeps; raises Stopped also when the signal's own was lost in somebody's callback."""
        time.sleep(seconds)
        if self.has_come:
            raise Stopped

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_stopping:
            kill_descendants()
            os._exit(128 + signal.SIGINT)
        self.has_come = self._is_stopping = True
        os.write(1, NOTICE)  # print() may be what was interrupted
        raise Stopped
