"""Limits the share of each tier of the KV cache that pins may take, and counts pinned blocks.

A pin keeps the blocks of a prompt from being evicted. A tier is the part of the cache in one
kind of memory: GPU memory or host memory.
"""

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from kvroute.blocks.tiers import GPU, HOST, Tier
from kvroute.contract.generation import GenerateRequest, PinRefusedError
from kvroute.replica.engine.protocol import Engine

K = TypeVar("K", bound=Hashable)


def pin_budget(share: float, *, capacity_blocks: int, block_size: int, max_model_len: int) -> int:
    """Return the maximum number of pinned blocks of a tier.

    This is `share` of all blocks, or less, so that the other blocks are enough for the longest
    possible request.
    """
    blocks_of_longest = -(-max_model_len // block_size)
    return max(0, min(int(share * capacity_blocks), capacity_blocks - blocks_of_longest))


def admit_pin(request: GenerateRequest, engine: Engine) -> None:
    """Raise PinRefusedError if the request's pin and all other pins together exceed the limit.

    A block that two pins share counts twice, here and in a replica's reports.
    """
    blocks = len(request.prompt_ids) // engine.facts.block_size
    tier = HOST if request.is_host_pin else GPU
    free = free_pin_blocks(request.pin, engine, tier)
    if blocks > free:
        limit = engine.facts.pin_blocks_in(tier)
        raise PinRefusedError(
            f"{request.pin} needs {blocks} KV blocks, but only {free} of the {limit} that pins may "
            f"take in {tier.label} are free; remove another pin, or raise {tier.pin_options}"
        )


def free_pin_blocks(name: str, engine: Engine, tier: Tier = GPU) -> int:
    """Return the number of blocks that a new pin with this name may take in the tier.

    The blocks of an earlier pin with this name count as free, because the new pin replaces it.
    """
    pins = engine.pins if tier == GPU else engine.host_pins
    return engine.facts.pin_blocks_in(tier) - sum(
        blocks for other, blocks in pins.items() if other != name
    )


class PinnedKeys(Generic[K]):
    """The blocks of each pin, identified by keys such as hashes.

    Several pins can have the same block. A block can be pinned before it is cached.
    """

    def __init__(self) -> None:
        self._keys: dict[str, Sequence[K]] = {}  # pin -> its blocks
        self._counts: dict[K, int] = {}  # block -> number of pins that have it

    def __contains__(self, key: K) -> bool:
        return key in self._counts

    def change(self, name: str, keys: Sequence[K]) -> tuple[list[K], list[K]]:
        """Replace the blocks of a pin. Without any blocks, the pin is removed.

        Args:
            name: The pin's name.
            keys: The blocks of a prompt in the prompt's order, without duplicates.

        Returns:
            The blocks that were not pinned before, and the blocks that are no longer pinned.
        """
        earlier, counts = self._keys.pop(name, ()), self._counts
        if keys:
            self._keys[name] = keys
        added = [key for key in keys if key not in counts]
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        for key in earlier:
            counts[key] -= 1
        removed = [key for key in earlier if not counts[key]]
        for key in removed:
            del counts[key]
        return added, removed

    def clear(self) -> None:
        self._keys.clear()
        self._counts.clear()
