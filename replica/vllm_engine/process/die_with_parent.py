"""vLLM's processes end with their replica; without this they would live for ever."""

import multiprocessing
import os
import signal
import threading
from typing import Any

from vllm.v1.engine.coordinator import DPCoordinatorProc


def die_with_parent() -> None:
    """Kills this process when the one that started it dies."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="die-with-parent", daemon=True).start()


_run_coordinator = DPCoordinatorProc.run_coordinator


def run_coordinator(*args: Any, **kwargs: Any) -> None:
    """Of several data parallel ranks; vLLM runs it in a process of its own."""
    die_with_parent()
    _run_coordinator(*args, **kwargs)


def install() -> None:
    """Before vLLM starts its coordinator. Its engines do the same in core/scheduler.py."""
    DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)
