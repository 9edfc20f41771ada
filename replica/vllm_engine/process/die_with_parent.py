"""Ends vLLM's processes when their replica ends. Otherwise they would run for ever."""

import multiprocessing
import os
import signal
import threading
from typing import Any

from vllm.v1.engine.coordinator import DPCoordinatorProc


def die_with_parent() -> None:
    """Start a thread that kills this process when its parent process dies."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="die-with-parent", daemon=True).start()


_run_coordinator = DPCoordinatorProc.run_coordinator


def run_coordinator(*args: Any, **kwargs: Any) -> None:
    """Run vLLM's coordinator of data parallel ranks, and end it with its parent.

    The coordinator is a separate process.
    """
    die_with_parent()
    _run_coordinator(*args, **kwargs)
