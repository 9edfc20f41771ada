"""A replica's audit: how far its table of cached blocks and the index in Redis are correct."""

from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
from msgspec import Struct

from kvroute.contract.records import VERSION, Count, Versioned, check_version
from kvroute.contract.unreadable import UnreadableError


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


class ReplicaAudit(Struct, frozen=True):
    """The result of one audit."""

    replica_id: str
    incarnation: str  # the replica's registration in the index; each registration has another one
    seq: Count  # number of the replica's latest change in the index
    known: Comparison  # the replica's table, compared with its engine
    index: Comparison  # Redis, compared with the replica's table
    version: int = VERSION
    # The part of `known` for copies of blocks in host memory; unset: the replica has no such tier.
    in_host: Comparison | msgspec.UnsetType = msgspec.UNSET


_versions = msgspec.json.Decoder(Versioned)
_audits = msgspec.json.Decoder(ReplicaAudit)


def encode_audit(audit: ReplicaAudit) -> bytes:
    return msgspec.json.encode(audit)


def decode_audit(answer: object) -> ReplicaAudit:
    """Decode a replica's answer. Raises one of unreadable.DECODE_ERRORS."""
    if not isinstance(answer, bytes):  # from a replica of another version
        raise UnreadableError(f"expected bytes, got a {type(answer).__name__}")
    check_version(_versions, answer)
    return _audits.decode(answer)
