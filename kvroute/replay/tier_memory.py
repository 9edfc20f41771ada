"""A slower tier (host memory) of a modelled replica, which keeps copies of the engine's blocks.

Blocks are copied back to the engine for one request at a time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import Tier
from kvroute.contract.keep import RetentionHint
from kvroute.contract.records import TierFacts
from kvroute.prefill.speed import PrefillModel
from kvroute.replay.workload.trace import Request
from kvroute.replica.sim_engine.copies import Copies
from kvroute.replica.sim_engine.host_cache import HostCache

T = TypeVar("T")  # type of the engine's sequences


@dataclass(frozen=True, slots=True)
class PendingReload(Generic[T]):
    """A running or waiting copy of blocks from the slower tier to the engine."""

    end: int  # number of the prompt's leading blocks that the engine has after the copy
    hashes: Sequence[Fingerprint]  # fingerprints of the copied blocks
    sequence: T  # the sequence that waits for the copy


class TierMemory(Generic[T]):
    """The blocks in a slower tier. Writing blocks takes no time; copying them back takes time."""

    def __init__(self, tier: Tier, facts: TierFacts, prefill: PrefillModel) -> None:
        self.reload_s = 0.0  # seconds of copies since the start
        self.new_ends_s: list[float] = []  # end times of new copies, which the caller clears
        self._cache = HostCache(facts.blocks)
        self._tier = tier
        self._facts = facts
        self._prefill = prefill
        self._reloads = Copies[PendingReload[T]]()
        self._reloading = set[Fingerprint]()  # blocks that are being copied
        self._added: dict[Fingerprint, None] = {}  # blocks stored since the last take_changes()
        self._dropped: dict[Fingerprint, None] = {}  # blocks dropped since then

    def __len__(self) -> int:
        """Return the number of copies that have not ended."""
        return len(self._reloads)

    def held(self) -> Iterator[Fingerprint]:
        """Return the fingerprints of all blocks in the tier; those of answers are negative."""
        return iter(self._cache)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block."""
        return self._facts.block_bytes

    def hits(self, request: Request, start: int) -> int:
        """Return how many blocks of the prompt in a row are in the tier, from block `start` on."""
        return self._cache.hits(request.reusable, start)

    def blocks_worth_copying(self, request: Request, hits: int) -> int:
        """Return how many blocks to copy for a request that has `hits` blocks in the engine.

        Returns 0 if computing these blocks takes no longer than copying them.
        """
        blocks, size = self._cache.hits(request.reusable, hits), request.block_tokens
        compute_s = self._prefill.seconds(hits * size, (hits + blocks) * size)
        return blocks if self._facts.reload_s(blocks) < compute_s else 0

    def is_reloading(self, block: Fingerprint) -> bool:
        """Return whether the block is being copied for another request."""
        return block in self._reloading

    def reload(self, sequence: T, request: Request, hits: int, blocks: int, now_s: float) -> float:
        """Schedule a copy after all earlier copies, and return the time at which it ends."""
        copy_s = self._facts.reload_s(blocks)
        end, hashes = hits + blocks, request.blocks[hits : hits + blocks]
        ends_s = self._reloads.begin(PendingReload(end, hashes, sequence), copy_s, now_s)
        self._reloading.update(hashes)
        self._cache.use(request.blocks[:end])
        self.new_ends_s.append(ends_s)
        self.reload_s += copy_s
        return ends_s

    def end_reload(self) -> PendingReload[T]:
        """Remove and return the oldest copy, which has ended."""
        reload = self._reloads.pop()
        self._reloading.difference_update(reload.hashes)
        return reload

    def store(self, blocks: Sequence[Fingerprint]) -> None:
        """Store leading blocks of a prompt, or all blocks of a prompt and its answer."""
        new, dropped = self._cache.store(blocks)
        _change(self._added, self._dropped, new)
        _change(self._dropped, self._added, dropped)

    def release(self, blocks: Sequence[Fingerprint], keep: RetentionHint) -> None:
        """Apply the retention hint of an ended request to its blocks."""
        self._cache.use(blocks, keep)

    def take_changes(self) -> tuple[list[Fingerprint], list[Fingerprint]]:
        """Return the fingerprints that were added and dropped since the last call."""
        added, self._added = self._added, {}
        dropped, self._dropped = self._dropped, {}
        return [*map(self._tier.fingerprint, added)], [*map(self._tier.fingerprint, dropped)]


def _change(
    to: dict[Fingerprint, None], against: dict[Fingerprint, None], blocks: Iterable[Fingerprint]
) -> None:
    """Record blocks in `to`. A block in `against` has only changed back, so it is removed there.

    Blocks of answers have negative fingerprints, which no request has, so they are not recorded.
    """
    for block in blocks:
        if block in against:
            del against[block]
        elif block > 0:
            to[block] = None
