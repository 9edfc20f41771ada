"""Placements without a fleet."""

from collections.abc import Sequence

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.router.placement.attempts import Placement
from kvroute.router.placement.policy import Candidate

BLOCK = 16  # tokens of a block


def anywhere(ids: Sequence[str], now_s: float = 0.0) -> Placement:
    """Return the placement of a short prompt that no replica has cached."""
    return ranked(*(Candidate(id_, 0, 0.0, 1.0) for id_ in ids))


def ranked(*candidates: Candidate, tokens: int = 100) -> Placement:
    """Return a placement with this ranking."""
    best = max((candidate.hit_blocks for candidate in candidates), default=0)
    return Placement(
        ranking=candidates,
        chain=tuple(Fingerprint(1 + number) for number in range(best)),
        best_hit_blocks=best,
        prompt_tokens=tokens,
        block_size=BLOCK,
    )
