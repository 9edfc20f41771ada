"""How far a list of cached blocks is correct."""

from collections.abc import Set as AbstractSet
from typing import Any

from msgspec import Struct

from kvroute.contract.records import Count


class Comparison(Struct, frozen=True):
    """How a list of cached blocks differs from the true list, in numbers of blocks."""

    blocks: Count  # number of blocks in the list
    missing: Count = 0  # number of blocks that are cached, but are not in the list
    surplus: Count = 0  # number of blocks in the list that are not cached

    @classmethod
    def of(cls, listed: AbstractSet[Any], truth: AbstractSet[Any]) -> "Comparison":
        """Compare the listed blocks with the blocks that are cached."""
        return cls(len(listed), len(truth - listed), len(listed - truth))

    def __add__(self, other: "Comparison") -> "Comparison":
        """Add up two comparisons, such as those of two ranks."""
        return Comparison(
            self.blocks + other.blocks, self.missing + other.missing, self.surplus + other.surplus
        )

    @property
    def true_blocks(self) -> int:
        """Return the number of blocks that are cached."""
        return self.blocks + self.missing - self.surplus

    @property
    def drift(self) -> int:
        """Return the number of wrong entries: missing and surplus blocks."""
        return self.missing + self.surplus
