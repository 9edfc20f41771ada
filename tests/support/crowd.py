"""Clients that keep a cluster busy for as long as a test takes."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx

PAUSE_S = 0.2  # of a client that was refused


@contextmanager
def crowd(clients: int, ask: Callable[[], httpx.Response]) -> Iterator[list[httpx.Response]]:
    """All of them ask again and again until the block ends; after it, the list has all answers."""
    over, answers = threading.Event(), list[httpx.Response]()

    def keep_asking() -> None:
        while not over.is_set():
            answers.append(ask())
            if answers[-1].is_error:
                over.wait(PAUSE_S)

    with ThreadPoolExecutor(clients) as pool:
        asking = [pool.submit(keep_asking) for _ in range(clients)]
        try:
            yield answers
        finally:
            over.set()
    for each in asking:
        each.result()
