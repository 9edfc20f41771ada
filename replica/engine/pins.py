"""Limits of pins: they may take a part of each tier of the KV cache."""

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from kvroute.blocks.tiers import GPU, HOST, Tier
from kvroute.contract.generation import GenerateRequest, PinRefusedError
from kvroute.replica.engine.protocol import Engine

K = TypeVar("K", bound=Hashable)


def pin_budget(share: float, *, capacity_blocks: int, block_size: int, max_model_len: int) -> int:
    """Blocks for pins: `share` of all, but always leaving room for the longest request."""
    longest = -(-max_model_len // block_size)
    return max(0, min(int(share * capacity_blocks), capacity_blocks - longest))


def admit_pin(request: GenerateRequest, engine: Engine) -> None:
    """Raises PinRefusedError when the request's pin does not fit in addition to the others.

    Blocks that two pins share count twice, here and in a replica's reports.
    """
    blocks = len(request.prompt_ids) // engine.facts.block_size
    tier = HOST if request.is_host_pin else GPU
    room = room_for_pin(request.pin, engine, tier)
    if blocks > room:
        most = engine.facts.pin_blocks_in(tier)
        raise PinRefusedError(
            f"{request.pin} needs {blocks} KV blocks and {room} of the {most} that pins may take "
            f"in {tier.label} are free; drop a named prefix or give pins a larger share"
        )


def room_for_pin(name: str, engine: Engine, tier: Tier = GPU) -> int:
    """Return the blocks of a tier that are free for a pin of this name."""
    pins = engine.pins if tier == GPU else engine.host_pins
    return engine.facts.pin_blocks_in(tier) - sum(
        blocks for other, blocks in pins.items() if other != name
    )


class PinnedKeys(Generic[K]):
    """Which blocks are pinned, by the pins' names. A block may be of several, or not there yet."""

    def __init__(self) -> None:
        self._of: dict[str, Sequence[K]] = {}
        self._counts: dict[K, int] = {}  # how many pins have it

    def __contains__(self, key: K) -> bool:
        return key in self._counts

    def change(self, name: str, keys: Sequence[K]) -> tuple[list[K], list[K]]:
        """The pin holds these blocks, of a prompt in its order and each once, instead of its
        earlier ones; without any it ends. Returns those that are pinned from now on, and those
        that no longer are."""
        earlier, counts = self._of.pop(name, ()), self._counts
        if keys:
            self._of[name] = keys
        begun = [key for key in keys if key not in counts]
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        for key in earlier:
            counts[key] -= 1
        over = [key for key in earlier if not counts[key]]
        for key in over:
            del counts[key]
        return begun, over

    def clear(self) -> None:
        self._of.clear()
        self._counts.clear()
