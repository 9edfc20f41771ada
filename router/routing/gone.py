"""Blocks that no replica holds any more: what tells a prefix that was evicted from a new one."""

from collections.abc import Iterable

from replica.kvindex.fingerprint import Fingerprint

GENERATION = 100_000  # blocks; a set so small grows, and is dropped, in milliseconds


class Gone:
    """Remembers the last GENERATION blocks at least, and twice as many at most."""

    def __init__(self) -> None:
        self._young: set[Fingerprint] = set()
        self._old: set[Fingerprint] = set()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __contains__(self, fingerprint: Fingerprint) -> bool:
        return fingerprint in self._young or fingerprint in self._old

    def add(self, fingerprints: Iterable[Fingerprint]) -> None:
        for fingerprint in fingerprints:
            if len(self._young) >= GENERATION:
                self._old, self._young = self._young, set()
            self._young.add(fingerprint)
