"""The positions in a prompt where a cache hit can end, for engines with several KV cache groups.

Such a position is called a boundary. vLLM reuses the prompt up to the last boundary that every
group can serve. The blocks that a group must have cached for a boundary depend on its layers:

- full attention: all blocks before the boundary;
- sliding window: the blocks that the window before the boundary touches;
- chunked local attention: the blocks from the start of the boundary's chunk;
- state space model: only the state at the boundary.

See `find_longest_cache_hit` of each manager in vllm/v1/core/single_type_kv_cache_manager.py.

Lengths and boundaries are counted in blocks of --block-size tokens. A chain is the sequence of
these blocks' fingerprints. The blocks of a group are as large as one or several of these blocks.
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

Holders = Callable[[Fingerprint], int]  # returns a bit mask of the replicas that have a block
ALL = -1  # a bit mask of all replicas


class UnknownLayoutError(Exception):
    """kvroute does not know which blocks a hit needs in an engine with this cache layout."""


class Boundaries:
    """The boundaries of one cache layout.

    Raises:
        UnknownLayoutError: the layout has a kind of layer or a block size that kvroute does not
            support; the message says which.
    """

    def __init__(self, layout: Layout, block_size: int) -> None:
        self._groups = [
            _GroupBlocks(number, group, block_size) for number, group in enumerate(layout.groups)
        ]
        # Every boundary is a multiple of this number of blocks.
        self.step = _blocks("hits in steps", layout.hit_tokens, block_size)

    def usable(self, length: int) -> int:
        """Return the last boundary at `length` or before it."""
        return length // self.step * self.step

    def added(self, chain: Sequence[Fingerprint], begin: int) -> list[Fingerprint]:
        """Return the fingerprints that an engine publishes when it has computed chain[begin:]."""
        end = self.usable(len(chain))
        return [
            group.fingerprint(chain, block_end)
            for group in self._groups
            for block_end in group.added(begin, end)
        ]

    def hits(
        self, chain: Sequence[Fingerprint], holders: Holders, replicas: int
    ) -> Iterator[tuple[int, int]]:
        """Yield the longest hits of the replicas, the longest of all first.

        Each item has a bit mask of replicas and a boundary: the longest hit of each of these
        replicas ends there. Replicas without a hit are left out.
        """
        lookups = [_lookup(group, chain, holders) for group in self._groups]
        end = self.usable(len(chain))
        while replicas and end:
            able, bound = replicas, end
            for lookup in lookups:
                group_able, bound = lookup.holders_at(end, replicas)
                able &= group_able
                if not able:
                    break
            if able:
                yield able, end
                replicas &= ~able
            end = self.usable(bound - 1)  # the other replicas have no hit that ends later

    def first_group_hit(self, chain: Sequence[Fingerprint], holders: Holders) -> int:
        """Return the last boundary that the first group of any replica can serve."""
        lookup = _lookup(self._groups[0], chain, holders)
        end = self.usable(len(chain))
        while end:
            able, bound = lookup.holders_at(end, ALL)
            if able:
                return end
            end = self.usable(bound - 1)
        return 0

    def known_blocks(
        self, chain: Sequence[Fingerprint], is_known: Callable[[Fingerprint], bool]
    ) -> int:
        """Return the last boundary whose block of the first group any replica has or had cached.

        Args:
            is_known: returns whether any replica has or had a block.
        """
        end = self.usable(len(chain))
        while end and not is_known(self._groups[0].fingerprint(chain, end)):
            end -= self.step
        return end


@lru_cache(maxsize=64)
def boundaries_of(layout: Layout, block_size: int) -> Boundaries:
    """Return the boundaries of a layout; equal layouts share one object.

    Raises:
        UnknownLayoutError: the layout has a kind of attention or a block size that kvroute does not
            support.
    """
    return Boundaries(layout, block_size)


class _GroupBlocks:
    """The blocks of one cache group. A block is identified by the position of its end."""

    def __init__(self, number: int, group: CacheGroup, block_size: int) -> None:
        self._number = number
        self._is_sparse = group.kind in STATE | WINDOW  # the engine keeps only some of the blocks
        self.size = _blocks("blocks", group.block_tokens, block_size)  # size of this group's blocks
        self.needs_all = group.kind in FULL  # a hit needs all blocks before its end
        self.start = _start(group, block_size)

    def fingerprint(self, chain: Sequence[Fingerprint], end: int) -> Fingerprint:
        return group_fingerprint(chain[end - 1], self._number)

    def needed(self, end: int) -> range:
        """Return the ends of the blocks that a hit up to `end` needs, the last block first."""
        return range(end, self.start(end), -self.size)

    def added(self, begin: int, end: int) -> range:
        """Return the ends of the blocks that an engine adds when it computes chain[begin:end].

        For sliding windows and states, vLLM keeps only the blocks that a hit up to `end` needs.
        With its option prefix_cache_retention_interval it keeps more blocks, and reports these in
        its events.
        """
        if self._is_sparse:
            return range(end, max(begin, self.start(end)), -self.size)
        return range((begin // self.size + 1) * self.size, end + 1, self.size)


class _Lookup:
    """Finds the replicas whose blocks of one group can serve a boundary of one chain."""

    def __init__(self, group: _GroupBlocks, chain: Sequence[Fingerprint], holders: Holders) -> None:
        self._group = group
        self._chain = chain
        self._holders = holders
        # A run is a sequence of the group's blocks without a gap. Item n of this list has the runs
        # of 2 ** n blocks: end of the run -> bit mask of the replicas that have all its blocks.
        self._runs: list[dict[int, int]] = [{}]

    def holders_at(self, end: int, replicas: int) -> tuple[int, int]:
        """Find the replicas whose blocks can serve the boundary `end`.

        Args:
            end: the boundary.
            replicas: bit mask of the replicas to look for.

        Returns:
            A bit mask of the replicas that can serve it, which may also have bits that are not in
            `replicas`. And a bound: the replicas that cannot serve `end` can only serve boundaries
            before this bound.
        """
        blocks = len(self._group.needed(end))
        if not blocks:
            return ALL, end
        return (self._run(end, blocks) if self._held(end) & replicas else 0), end

    def _held(self, end: int) -> int:
        """Return the replicas that have the group's block that ends at `end`."""
        holders = self._runs[0].get(end)
        if holders is None:
            holders = self._holders(self._group.fingerprint(self._chain, end))
            self._runs[0][end] = holders
        return holders

    def _run(self, end: int, blocks: int) -> int:
        """Return the replicas that have all of the last `blocks` blocks before `end`.

        This run is the union of two overlapping runs whose lengths are powers of two.
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
        holders = self._runs[power].get(end)
        if holders is None:
            holders = self._doubled(end, power - 1)
            if holders:
                half = self._group.size << power - 1
                holders &= self._doubled(end - half, power - 1)
            self._runs[power][end] = holders
        return holders


class _PrefixLookup(_Lookup):
    """A lookup for full attention, where a hit needs all blocks before its end."""

    def __init__(self, group: _GroupBlocks, chain: Sequence[Fingerprint], holders: Holders) -> None:
        super().__init__(group, chain, holders)
        self._able = [ALL]  # item n: bit mask of the replicas that have all of the first n blocks

    def holders_at(self, end: int, replicas: int) -> tuple[int, int]:
        size, able = self._group.size, self._able
        blocks, rest = divmod(end, size)
        while len(able) <= blocks and able[-1]:
            able.append(able[-1] & self._held(len(able) * size))
        last = min(blocks, len(able) - 1)
        if not able[last] & replicas:
            # The smallest n such that none of `replicas` has all of the first n blocks.
            missing = bisect_left(able, True, hi=last, key=lambda holders: not holders & replicas)
            return 0, missing * size
        return able[last] & (self._held(end) if rest else ALL), end


def _lookup(group: _GroupBlocks, chain: Sequence[Fingerprint], holders: Holders) -> _Lookup:
    return (_PrefixLookup if group.needs_all else _Lookup)(group, chain, holders)


def _blocks(quantity: str, tokens: int, block_size: int) -> int:
    """Convert a number of tokens to blocks.

    Args:
        quantity: what the engine's cache has of this size, for the error message.

    Raises:
        UnknownLayoutError: the number is not a multiple of the block size.
    """
    if tokens % block_size:
        raise UnknownLayoutError(
            f"the engine's cache has {quantity} of {tokens} tokens, which is not a multiple of "
            f"--block-size {block_size}; restart with a --block-size that divides {tokens}"
        )
    return tokens // block_size


def _start(group: CacheGroup, block_size: int) -> Callable[[int], int]:
    """Return a function from a boundary to the position where the group's needed blocks begin.

    A hit up to the boundary needs all of the group's blocks between this position and the boundary.
    """
    tokens, size = group.block_tokens, group.block_tokens // block_size
    if group.kind in FULL:
        return lambda end: 0
    if group.kind in STATE:
        return lambda end: end - 1
    if group.kind in WINDOW:
        # The window of a token includes the token itself. The rest is rounded up to whole blocks.
        reach = -(-(group.window_tokens - 1) // tokens) * size
        return lambda end: max(0, end - reach)
    if group.kind in CHUNK:
        chunk = group.window_tokens
        return lambda end: end * block_size // chunk * chunk // tokens * size
    raise UnknownLayoutError(
        f"kvroute does not know which blocks a hit needs in {group.kind} layers"
    )
