"""A modelled replica's host memory, and the copies back to its engine: one at a time."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvroute.blocks.cache_groups import in_host
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import Keep
from kvroute.contract.records import HostTier
from kvroute.prefill.speed import PrefillModel
from kvroute.replay.workload.trace import Request
from kvroute.replica.sim_engine.copies import Copies
from kvroute.replica.sim_engine.host_cache import HostCache

T = TypeVar("T")  # a sequence of the engine


@dataclass(frozen=True, slots=True)
class Reload(Generic[T]):
    """Blocks on their way to the engine."""

    end: int  # blocks of the prompt that are in the engine then
    hashes: Sequence[Fingerprint]  # of those that are copied
    sequence: T  # who waits for them


class HostMemory(Generic[T]):
    """Blocks are written through, in no time; copies back take theirs."""

    def __init__(self, tier: HostTier, prefill: PrefillModel) -> None:
        self.reload_s = 0.0  # spent on copies so far
        self.begun_s: list[float] = []  # when copies end that the caller does not know of yet
        self._cache = HostCache(tier.blocks)
        self._tier = tier
        self._prefill = prefill
        self._reloads = Copies[Reload[T]]()
        self._coming = set[Fingerprint]()
        self._added: dict[Fingerprint, None] = {}  # since the last take_changes
        self._dropped: dict[Fingerprint, None] = {}

    def __len__(self) -> int:
        """Copies that have not ended."""
        return len(self._reloads)

    def held(self) -> Iterator[Fingerprint]:
        """The blocks that are here; those of answers are negative."""
        return iter(self._cache)

    def worth(self, request: Request, hits: int) -> int:
        """How many blocks are reloaded behind the engine's hits: those that are here, or none where
        computing them takes no longer."""
        blocks, size = self._cache.hits(request.reusable, hits), request.block_tokens
        compute_s = self._prefill.seconds(hits * size, (hits + blocks) * size)
        return blocks if self._tier.reload_s(blocks) < compute_s else 0

    def is_coming(self, block: Fingerprint) -> bool:
        """It is being copied for another request."""
        return block in self._coming

    def reload(self, sequence: T, request: Request, hits: int, blocks: int, now_s: float) -> float:
        """Begins a copy, or queues it behind those before; returns when it ends."""
        copy_s = self._tier.reload_s(blocks)
        end, hashes = hits + blocks, request.blocks[hits : hits + blocks]
        ends_s = self._reloads.begin(Reload(end, hashes, sequence), copy_s, now_s)
        self._coming.update(hashes)
        self._cache.use(request.blocks[:end])
        self.begun_s.append(ends_s)
        self.reload_s += copy_s
        return ends_s

    def end_reload(self) -> Reload[T]:
        """The first copy has ended."""
        reload = self._reloads.pop()
        self._coming.difference_update(reload.hashes)
        return reload

    def store(self, blocks: Sequence[Fingerprint]) -> None:
        """A prompt's first blocks, or all of them and its answer's."""
        new, dropped = self._cache.store(blocks)
        _change(self._added, self._dropped, new)
        _change(self._dropped, self._added, dropped)

    def release(self, blocks: Sequence[Fingerprint], keep: Keep) -> None:
        """Their request has ended; it says how to keep them."""
        self._cache.use(blocks, keep)

    def take_changes(self) -> tuple[list[Fingerprint], list[Fingerprint]]:
        """What routers hear: members that were added, and those that were dropped."""
        added, self._added = self._added, {}
        dropped, self._dropped = self._dropped, {}
        return [*map(in_host, added)], [*map(in_host, dropped)]


def _change(
    to: dict[Fingerprint, None], against: dict[Fingerprint, None], blocks: Iterable[Fingerprint]
) -> None:
    """Notes blocks; one that was noted in the other way is as it was before. Answers' blocks, which
    are negative, match nothing."""
    for block in blocks:
        if block in against:
            del against[block]
        elif block > 0:
            to[block] = None
