"""The slower tiers of a modelled replica (host memory, a disk), which keep copies of its blocks.

Each block is written to all tiers at once. Blocks are copied back to the engine for one request at
a time, from the fastest tier that has them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import HOST, Tier, TierBlocks
from kvroute.contract.keep import RetentionHint
from kvroute.contract.records import TierFacts
from kvroute.prefill.speed import PrefillModel
from kvroute.replay.workload.trace import Request
from kvroute.replica.modelled.host_cache import HostCache
from kvroute.replica.modelled.modelled_copies import Copies

T = TypeVar("T")  # type of the engine's sequences


@dataclass(frozen=True, slots=True)
class PendingReload(Generic[T]):
    """A running or waiting copy of blocks from slower tiers to the engine."""

    end: int  # number of the prompt's leading blocks that the engine has after the copy
    hashes: Sequence[Fingerprint]  # fingerprints of the copied blocks
    sequence: T  # the sequence that waits for the copy


class ModelledTier:
    """The blocks in one slower tier."""

    def __init__(self, tier: Tier, facts: TierFacts) -> None:
        self.tier = tier
        self.facts = facts
        self.cache = HostCache(facts.blocks)
        self._added: dict[Fingerprint, None] = {}  # blocks stored since the last take_changes()
        self._dropped: dict[Fingerprint, None] = {}  # blocks dropped since then

    def store(self, blocks: Sequence[Fingerprint]) -> None:
        """Store leading blocks of a prompt, or all blocks of a prompt and its answer."""
        new, dropped = self.cache.store(blocks)
        _change(self._added, self._dropped, new)
        _change(self._dropped, self._added, dropped)

    def take_changes(self) -> tuple[list[Fingerprint], list[Fingerprint]]:
        """Return the fingerprints that were added and dropped since the last call."""
        added, self._added = self._added, {}
        dropped, self._dropped = self._dropped, {}
        return [*map(self.tier.fingerprint, added)], [*map(self.tier.fingerprint, dropped)]


class TierMemory(Generic[T]):
    """The blocks in all slower tiers. Writing blocks takes no time; copying them back takes time.

    Args:
        tiers: The tiers, the fastest first.
        prefill: How long the engine takes to compute tokens.
    """

    def __init__(self, tiers: Mapping[Tier, TierFacts], prefill: PrefillModel) -> None:
        self.reload_s = 0.0  # seconds of copies since the start
        self.new_ends_s: list[float] = []  # end times of new copies, which the caller clears
        self.levels = [ModelledTier(tier, facts) for tier, facts in tiers.items()]
        self._prefill = prefill
        self._reloads = Copies[PendingReload[T]]()
        self._reloading = set[Fingerprint]()  # blocks that are being copied

    def __len__(self) -> int:
        """Return the number of copies that have not ended."""
        return len(self._reloads)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block."""
        return self.levels[0].facts.block_bytes

    def hits(self, request: Request, start: int, *, slowest: int = 0) -> int:
        """Return how many blocks of the prompt in a row are in the tiers, from block `start` on.

        Args:
            request: The request of the prompt.
            start: The first block.
            slowest: Number of the slowest tier that counts; 0: all tiers count.
        """
        levels = [each for each in self.levels if not slowest or each.tier.number <= slowest]
        end = start
        while more := max((each.cache.hits(request.reusable, end) for each in levels), default=0):
            end += more
        return end - start

    def hits_in_host(self, request: Request, start: int) -> int:
        """Return how many blocks of the prompt in a row are in host memory, from `start` on."""
        return self.hits(request, start, slowest=HOST.number)

    def worth_copying(self, request: Request, hits: int) -> list[TierBlocks]:
        """Return what to copy from each tier for a request that has `hits` blocks in the engine.

        The blocks of a tier are copied if that takes less time than computing them.
        """
        parts = list[TierBlocks]()
        end, size = hits, request.block_tokens
        for level in self.levels:
            blocks = self.hits(request, end, slowest=level.tier.number)
            if not blocks:
                continue
            compute_s = self._prefill.seconds(end * size, (end + blocks) * size)
            if level.facts.reload_s(blocks) >= compute_s:
                break
            parts.append(TierBlocks(level.tier, blocks))
            end += blocks
        return parts

    def is_reloading(self, block: Fingerprint) -> bool:
        """Return whether the block is being copied for another request."""
        return block in self._reloading

    def reload(
        self, sequence: T, request: Request, hits: int, parts: Sequence[TierBlocks], now_s: float
    ) -> float:
        """Schedule a copy after all earlier copies, and return the time at which it ends.

        Blocks that come from a slower tier than the first are then in the first one, too.
        """
        facts = {level.tier: level.facts for level in self.levels}
        copy_s = sum(facts[part.tier].reload_s(part.blocks) for part in parts)
        end = hits + sum(part.blocks for part in parts)
        hashes = request.blocks[hits:end]
        ends_s = self._reloads.begin(PendingReload(end, hashes, sequence), copy_s, now_s)
        self._reloading.update(hashes)
        first = self.levels[0]
        if parts[-1].tier != first.tier:
            first.store(hashes)
        for level in self.levels:
            level.cache.use(request.blocks[:end])
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
        for level in self.levels:
            level.store(blocks)

    def release(self, blocks: Sequence[Fingerprint], keep: RetentionHint) -> None:
        """Apply the retention hint of an ended request to its blocks."""
        for level in self.levels:
            level.cache.use(blocks, keep)


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
