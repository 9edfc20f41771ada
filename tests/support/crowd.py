"""Clients that keep a cluster busy until a test ends."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx

PAUSE_S = 0.2  # seconds that a client waits after an error


@contextmanager
def crowd(clients: int, ask: Callable[[], httpx.Response]) -> Iterator[list[httpx.Response]]:
    """Send requests again and again with each client until the context ends.

    Then the yielded list contains all responses.
    """
    over, answers = threading.Event(), list[httpx.Response]()

    def keep_asking() -> None:
        while not over.is_set():
            answers.append(ask())
            if answers[-1].is_error:
                over.wait(PAUSE_S)

    with ThreadPoolExecutor(clients) as pool:
        futures = [pool.submit(keep_asking) for _ in range(clients)]
        try:
            yield answers
        finally:
            over.set()
    for future in futures:
        future.result()
