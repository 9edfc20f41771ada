"""A history of evicted blocks, which tells an evicted prefix from one that was never cached."""

from collections.abc import Sequence

from kvroute.blocks.fingerprint import Fingerprint

# Number of blocks in each of the two sets of the history. A larger set would block the event loop
# for more than a few milliseconds when it grows or is freed.
GENERATION = 100_000


class EvictionHistory:
    """The last blocks that were evicted: at least GENERATION of them, at most twice as many."""

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
