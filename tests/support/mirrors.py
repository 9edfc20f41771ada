"""Reads the blocks of one replica from a router's mirror (router/index/mirror.py)."""

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.router.index.mirror import Mirror


def held_by(mirror: Mirror, replica_id: str) -> set[Fingerprint]:
    """Return all blocks of a replica."""
    return set[Fingerprint]().union(*mirror.walk(replica_id))
