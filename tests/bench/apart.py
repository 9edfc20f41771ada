"""Runs each measurement in a new process, so that earlier ones do not affect its memory."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def apart(act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a new process; return its result or raise its error."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(act, *args, **kwargs).result()
