"""Remembers blocks that no replica holds any more, so an evicted prefix differs from a new one."""

from collections.abc import Sequence

from kvroute.blocks.fingerprint import Fingerprint

GENERATION = 100_000  # blocks; a set of this size grows, and is freed, in milliseconds


class EvictionHistory:
    """Remembers at least the last GENERATION blocks, and at most twice as many."""

    def __init__(self) -> None:
        self._recent: set[Fingerprint] = set()
        self._old: set[Fingerprint] = set()

    def __len__(self) -> int:
        return len(self._recent) + len(self._old)

    def __contains__(self, fingerprint: Fingerprint) -> bool:
        return fingerprint in self._recent or fingerprint in self._old

    def add(self, fingerprints: Sequence[Fingerprint]) -> None:
        begin = 0
        while begin < len(fingerprints):
            if len(self._recent) >= GENERATION:
                self._old, self._recent = self._recent, set()
            end = begin + GENERATION - len(self._recent)
            self._recent.update(fingerprints[begin:end])
            begin = end
