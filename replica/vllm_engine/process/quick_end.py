"""Lets vLLM's processes end quickly.

At its end, Python searches all objects for garbage once more. With the objects of torch, that takes
5 to 20 s on busy cores, and vLLM kills a process that has not ended after a time. A killed process
leaves shared memory behind.
"""

import atexit
import gc
import multiprocessing

STOP_S = 20.0  # seconds that vLLM's processes get to end; most of them need 2 s


def end_quickly() -> None:
    """Make this process skip the search for garbage at its end, if another one has started it."""
    if multiprocessing.parent_process() is None:
        return
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
