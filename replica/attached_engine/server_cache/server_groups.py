"""The KV cache groups of a vLLM server, as far as its events have named them.

A server tells nothing about its groups before it stores their first blocks. Until then, it counts
as a server with one group of full attention.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from kvroute.blocks.cache_groups import FULL, HOST_GROUPS, STATE, WINDOW, CacheGroup, Layout
from kvroute.blocks.tiers import GPU, GROUPS, HOST
from kvroute.contract.records import MAX_COUNT
from kvroute.replica.attached_engine.server_cache.wire import StoredEvent

FULL_ATTENTION = "full_attention"
MAX_BLOCK_TOKENS = 2**20  # most tokens of a block that an event can have; more is nonsense

Place = tuple[int, int]  # number of a tier of memory, and the server's number of a group


class ServerGroups:
    """Learns the groups from events, and gives them the numbers and the layout of an engine."""

    def __init__(self, unit: int) -> None:
        """Create the groups of a server that has named none.

        Args:
            unit: The tokens of one fingerprint.
        """
        self._unit = unit
        self._groups: dict[int, CacheGroup] = {}
        self._has_host = False
        self._describe()

    def _describe(self) -> None:
        groups = self._groups or {0: CacheGroup(FULL_ATTENTION, self._unit)}
        order = sorted(groups, key=lambda number: (groups[number].kind not in FULL, number))
        self.first = order[0]  # the server's number of the engine's first group
        distinct = [*dict.fromkeys(groups[number] for number in order)]
        is_plain = distinct == [CacheGroup(FULL_ATTENTION, self._unit)]
        hit_tokens = math.lcm(*(group.block_tokens for group in distinct))
        # The layout for the replica's record; None: only full attention, in blocks of `unit`.
        self.layout = None if is_plain else Layout(tuple(distinct), min(hit_tokens, MAX_COUNT))
        tiers = (GPU, HOST) if self._has_host else (GPU,)
        # The engine's number of each group in each tier: full attention first.
        self.numbers: dict[Place, int] = {
            (tier.number, number): tier.number * len(order) + index
            for tier in tiers
            for index, number in enumerate(order)
        }
        entries = [distinct.index(groups[number]) for number in order]
        self.group_entries: Sequence[int] = tuple(  # the value of Engine.group_entries
            HOST_GROUPS * tier.number + entry for tier in tiers for entry in entries
        )
        # How many of the server's blocks `unit` tokens of a prompt take in all groups.
        self._blocks_per_unit = sum(
            (Fraction(self._unit, groups[number].block_tokens) for number in order), Fraction(0)
        )

    def units(self, blocks: int) -> int:
        """Return how many blocks of `unit` tokens fit into this many of the server's blocks."""
        return int(blocks / self._blocks_per_unit)

    def add_host(self) -> None:
        """Give numbers to the groups in the server's host memory, too."""
        self._has_host = True
        self._describe()

    def learn(self, event: StoredEvent) -> None:
        """Learn the group of an event about the memory that the engine computes in.

        A block can be stored before it is full (a "partial" state), so a group's block size is the
        largest that an event had.
        """
        number = event.group_idx or 0
        group, before = self._group(event), self._groups.get(number)
        if group is None or (before and group.block_tokens <= before.block_tokens):
            return
        self._groups[number] = group
        self._describe()

    def _group(self, event: StoredEvent) -> CacheGroup | None:
        """Return the group that an event describes; None: it does not say the kind."""
        number, size = event.group_idx or 0, event.block_size
        kind = event.kv_cache_spec_kind or ("" if number else FULL_ATTENTION)
        if not kind or not 0 <= number < GROUPS or not 0 < size <= MAX_BLOCK_TOKENS:
            return None
        window = event.kv_cache_spec_sliding_window or 0
        if kind in WINDOW and 0 < window <= MAX_COUNT:
            return CacheGroup(kind, size, window)
        if kind in STATE:
            return CacheGroup(kind, max(size, self._unit))
        # No hit needs more than all blocks before its end. So a chunk, whose length is in no event,
        # and a kind that is unknown here count as full attention: hits are never expected in vain.
        return CacheGroup(FULL_ATTENTION, size)

    def reported(self, event: StoredEvent) -> int:
        """Return how many of the last blocks of a reported hit are cached.

        vLLM reports all blocks of the hit for each group, also those that a window or a state does
        not need and that are not cached.
        """
        kind = event.kv_cache_spec_kind or ("" if event.group_idx else FULL_ATTENTION)
        group = self._groups.get(event.group_idx or 0)
        if kind in FULL:
            return len(event.block_hashes)
        if kind in STATE:
            return 1
        if group is None or kind not in WINDOW or group.kind != kind:
            return 0
        return -(-(group.window_tokens - 1) // group.block_tokens)
