"""The boundaries of a prompt at which a hit can end, for engines with several KV cache groups.

A boundary is a length of a prompt's beginning. vLLM takes the longest one that every group can
serve. Which cached blocks a group needs for a boundary depends on its kind of layers:

- full attention: all blocks before the boundary;
- sliding window: the blocks that the window before the boundary touches;
- chunked local attention: the blocks from the start of the boundary's chunk;
- state space model: only the state at the boundary.

See `find_longest_cache_hit` of each manager in vllm/v1/core/single_type_kv_cache_manager.py.

Lengths and boundaries are counted in blocks of the size that fingerprints have. The size of each
group's blocks is a multiple of that size.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from kvroute.blocks.cache_groups import (
    CHUNK,
    FULL,
    STATE,
    WINDOW,
    CacheGroup,
    Layout,
    group_fingerprint,
)
from kvroute.blocks.fingerprint import Fingerprint

Holders = Callable[[Fingerprint], int]  # the replicas that have a block, as the bits of a mask
ALL = -1  # a mask of all replicas


class UnknownLayoutError(Exception):
    """kvroute does not know which blocks a hit needs in an engine with this cache layout."""


class Boundaries:
    """The boundaries of one cache layout.

    Raises:
        UnknownLayoutError: kvroute does not know the layout; the message says which part of it.
    """

    def __init__(self, layout: Layout, block_size: int) -> None:
        self.step = _blocks(layout.hit_tokens, block_size)
        self._groups = [
            _GroupBlocks(number, group, block_size) for number, group in enumerate(layout.groups)
        ]

    def usable(self, length: int) -> int:
        """Return the deepest boundary that is not beyond `length`."""
        return length // self.step * self.step

    def added(self, chain: Sequence[Fingerprint], begin: int) -> list[Fingerprint]:
        """Return the fingerprints that an engine publishes after it has computed chain[begin:]."""
        end = self.usable(len(chain))
        return [
            group.member(chain, each) for group in self._groups for each in group.added(begin, end)
        ]

    def hits(
        self, chain: Sequence[Fingerprint], holders: Holders, replicas: int
    ) -> Iterator[tuple[int, int]]:
        """Yield each boundary at which replicas have their longest hit, the deepest boundary first.

        Each item is a mask of these replicas and the boundary. Replicas without a hit are left
        out.
        """
        lookups = [_lookup(group, chain, holders) for group in self._groups]
        end = self.usable(len(chain))
        while replicas and end:
            able, hole = replicas, end
            for lookup in lookups:
                held, hole = lookup.at(end, replicas)
                able &= held
                if not able:
                    break
            if able:
                yield able, end
                replicas &= ~able
            end = self.usable(hole - 1)

    def in_first(self, chain: Sequence[Fingerprint], holders: Holders) -> int:
        """Return the deepest boundary that the first group alone can serve, on any replica."""
        lookup = _lookup(self._groups[0], chain, holders)
        end = self.usable(len(chain))
        while end:
            held, hole = lookup.at(end, ALL)
            if held:
                return end
            end = self.usable(hole - 1)
        return 0

    def known(self, chain: Sequence[Fingerprint], is_known: Callable[[Fingerprint], bool]) -> int:
        """Return the deepest boundary whose block is known in the first group.

        `is_known` says whether any replica has or had the block.
        """
        end = self.usable(len(chain))
        while end and not is_known(self._groups[0].member(chain, end)):
            end -= self.step
        return end


@lru_cache(maxsize=64)
def boundaries_of(layout: Layout, block_size: int) -> Boundaries:
    """Return the boundaries of a layout; equal layouts share one object.

    Raises:
        UnknownLayoutError: the layout has a kind of attention that kvroute does not know.
    """
    return Boundaries(layout, block_size)


class _GroupBlocks:
    """One group's blocks, each known by where it ends in the chain."""

    def __init__(self, number: int, group: CacheGroup, block_size: int) -> None:
        self._number = number
        self._is_sparse = group.kind in STATE | WINDOW
        self.size = _blocks(group.block_tokens, block_size)
        self.needs_all = group.kind in FULL
        self.start = _start(group, block_size)

    def member(self, chain: Sequence[Fingerprint], end: int) -> Fingerprint:
        return group_fingerprint(chain[end - 1], self._number)

    def needed(self, end: int) -> range:
        """Return the ends of the blocks that the boundary `end` needs, the last block first."""
        return range(end, self.start(end), -self.size)

    def added(self, begin: int, end: int) -> range:
        """Return the ends of the blocks that an engine caches when it computes blocks begin to end.

        For sliding windows and states, vLLM keeps only the blocks that the boundary `end` needs.
        With its option prefix_cache_retention_interval it keeps more, and reports these in its
        events.
        """
        if self._is_sparse:
            return range(end, max(begin, self.start(end)), -self.size)
        return range((begin // self.size + 1) * self.size, end + 1, self.size)


class _Lookup:
    """Finds the replicas that have one group's blocks of one chain."""

    def __init__(self, group: _GroupBlocks, chain: Sequence[Fingerprint], holders: Holders) -> None:
        self._group = group
        self._chain = chain
        self._holders = holders
        # Item n is for runs of 2 ** n blocks: end of the run -> replicas that have all its blocks.
        self._runs: list[dict[int, int]] = [{}]

    def at(self, end: int, replicas: int) -> tuple[int, int]:
        """Return the replicas that can serve the boundary `end`, and a bound for the others.

        The other replicas can serve only boundaries that are smaller than the bound.
        """
        blocks = len(self._group.needed(end))
        if not blocks:
            return ALL, end
        return (self._run(end, blocks) if self._held(end) & replicas else 0), end

    def _held(self, end: int) -> int:
        found = self._runs[0].get(end)
        if found is None:
            found = self._holders(self._group.member(self._chain, end))
            self._runs[0][end] = found
        return found

    def _run(self, end: int, blocks: int) -> int:
        """Return the replicas that have all of the last `blocks` blocks before `end`.

        The run is the union of two overlapping runs whose lengths are powers of two.
        """
        power = blocks.bit_length() - 1
        rest = blocks - (1 << power)
        last = self._doubled(end, power)
        return last & self._doubled(end - rest * self._group.size, power) if last and rest else last

    def _doubled(self, end: int, power: int) -> int:
        """Return the replicas that have all of the last 2 ** power blocks before `end`."""
        if not power:
            return self._held(end)
        while len(self._runs) <= power:
            self._runs.append({})
        found = self._runs[power].get(end)
        if found is None:
            found = self._doubled(end, power - 1)
            if found:
                half = self._group.size << power - 1
                found &= self._doubled(end - half, power - 1)
            self._runs[power][end] = found
        return found


class _PrefixLookup(_Lookup):
    """Finds the replicas for a group in which a boundary needs all blocks before it."""

    def __init__(self, group: _GroupBlocks, chain: Sequence[Fingerprint], holders: Holders) -> None:
        super().__init__(group, chain, holders)
        self._able = [ALL]  # item n: the replicas that have all of the first n blocks

    def at(self, end: int, replicas: int) -> tuple[int, int]:
        size, able = self._group.size, self._able
        blocks, rest = divmod(end, size)
        while len(able) <= blocks and able[-1]:
            able.append(able[-1] & self._held(len(able) * size))
        known = min(blocks, len(able) - 1)
        if not able[known] & replicas:
            missing = bisect_left(able, True, hi=known, key=lambda each: not each & replicas)
            return 0, missing * size
        return able[known] & (self._held(end) if rest else ALL), end


def _lookup(group: _GroupBlocks, chain: Sequence[Fingerprint], holders: Holders) -> _Lookup:
    return (_PrefixLookup if group.needs_all else _Lookup)(group, chain, holders)


def _blocks(tokens: int, block_size: int) -> int:
    if tokens % block_size:
        raise UnknownLayoutError(
            f"its cache has blocks of {tokens} tokens, which is not a multiple of --block-size "
            f"{block_size}; restart with a --block-size that divides {tokens}"
        )
    return tokens // block_size


def _start(group: CacheGroup, block_size: int) -> Callable[[int], int]:
    """Return a function from a boundary to a position before it.

    The boundary needs the group's blocks that end after that position.
    """
    tokens, size = group.block_tokens, group.block_tokens // block_size
    if group.kind in FULL:
        return lambda end: 0
    if group.kind in STATE:
        return lambda end: end - 1
    if group.kind in WINDOW:
        reach = -(-(group.window_tokens - 1) // tokens) * size
        return lambda end: max(0, end - reach)
    if group.kind in CHUNK:
        chunk = group.window_tokens
        return lambda end: end * block_size // chunk * chunk // tokens * size
    raise UnknownLayoutError(
        f"kvroute does not know which blocks a hit needs in {group.kind} layers"
    )
