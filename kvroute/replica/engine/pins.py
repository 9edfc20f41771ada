"""Pins are limited to a part of the KV cache."""

from collections.abc import Mapping

from kvroute.contract.generation import GenerateRequest, PinRefusedError
from kvroute.contract.records import EngineFacts


def pin_budget(share: float, *, capacity_blocks: int, block_size: int, max_model_len: int) -> int:
    """Blocks for pins: `share` of all, but always leaving room for the longest request."""
    longest = -(-max_model_len // block_size)
    return max(0, min(int(share * capacity_blocks), capacity_blocks - longest))


def admit_pin(request: GenerateRequest, pins: Mapping[str, int], facts: EngineFacts) -> None:
    """Raises PinRefusedError when the request's pin does not fit in addition to the others.

    Blocks that two pins share count twice, here and in a replica's reports.
    """
    blocks = len(request.prompt_ids) // facts.block_size
    room = room_for_pin(request.pin, pins, facts)
    if blocks > room:
        raise PinRefusedError(
            f"{request.pin} needs {blocks} KV blocks and {room} of the {facts.pin_blocks} that "
            "pins may take are free; drop a named prefix or give pins a larger share"
        )


def room_for_pin(name: str, pins: Mapping[str, int], facts: EngineFacts) -> int:
    """Blocks that are free for a pin of this name."""
    others = sum(blocks for other, blocks in pins.items() if other != name)
    return facts.pin_blocks - others
