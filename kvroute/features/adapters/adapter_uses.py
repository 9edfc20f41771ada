"""Counts the requests that use each adapter."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Uses:
    """The number of running requests of each adapter, by the adapter's key."""

    def __init__(self) -> None:
        self._counts = Counter[str]()

    def of(self, key: str) -> int:
        """Return the number of running requests for an adapter."""
        return self._counts[key]

    @contextmanager
    def use(self, key: str) -> Iterator[None]:
        """Count a request for an adapter while the block runs."""
        self._counts[key] += 1
        try:
            yield
        finally:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
