"""Limits pins to a part of each tier of the KV cache, and counts them."""

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from kvroute.blocks.tiers import GPU, HOST, Tier
from kvroute.contract.generation import GenerateRequest, PinRefusedError
from kvroute.replica.engine.protocol import Engine

K = TypeVar("K", bound=Hashable)


def pin_budget(share: float, *, capacity_blocks: int, block_size: int, max_model_len: int) -> int:
    """Return the limit of pinned blocks: `share` of all, but leave room for the longest request."""
    longest = -(-max_model_len // block_size)
    return max(0, min(int(share * capacity_blocks), capacity_blocks - longest))


def admit_pin(request: GenerateRequest, engine: Engine) -> None:
    """Raise PinRefusedError if the request's pin does not fit in addition to the other pins.

    Blocks that two pins share count twice, here and in a replica's reports.
    """
    blocks = len(request.prompt_ids) // engine.facts.block_size
    tier = HOST if request.is_host_pin else GPU
    room = room_for_pin(request.pin, engine, tier)
    if blocks > room:
        limit = engine.facts.pin_blocks_in(tier)
        raise PinRefusedError(
            f"{request.pin} needs {blocks} KV blocks, but only {room} of the {limit} that pins may "
            f"take in {tier.label} are free; delete a named prefix, or raise {tier.pin_options}"
        )


def room_for_pin(name: str, engine: Engine, tier: Tier = GPU) -> int:
    """Return the number of blocks of a tier that a pin of this name may take."""
    pins = engine.pins if tier == GPU else engine.host_pins
    return engine.facts.pin_blocks_in(tier) - sum(
        blocks for other, blocks in pins.items() if other != name
    )


class PinnedKeys(Generic[K]):
    """The pinned blocks of each pin. Several pins can have a block, which may not be cached yet."""

    def __init__(self) -> None:
        self._of: dict[str, Sequence[K]] = {}
        self._counts: dict[K, int] = {}  # block -> number of pins that have it

    def __contains__(self, key: K) -> bool:
        return key in self._counts

    def change(self, name: str, keys: Sequence[K]) -> tuple[list[K], list[K]]:
        """Replace the blocks of a pin; without any blocks, the pin ends.

        Args:
            name: The pin's name.
            keys: Blocks of a prompt in the prompt's order, each once.

        Returns:
            The blocks that have become pinned, and the blocks that are no longer pinned.
        """
        earlier, counts = self._of.pop(name, ()), self._counts
        if keys:
            self._of[name] = keys
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
        self._of.clear()
        self._counts.clear()
