"""The number of blocks by which two lists of one replica's cached blocks differ."""

from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
from msgspec import Struct

from kvroute.contract.records import VERSION, Count, Versioned, check_version
from kvroute.contract.unreadable import UnreadableError


class Comparison(Struct, frozen=True):
    """A list of cached blocks, compared with the true list, which is nearer to the engine."""

    blocks: Count  # blocks in the list
    missing: Count = 0  # blocks that are cached, but not in the list
    surplus: Count = 0  # blocks in the list that are not cached

    @classmethod
    def of(cls, account: AbstractSet[Any], truth: AbstractSet[Any]) -> "Comparison":
        return cls(len(account), len(truth - account), len(account - truth))

    def __add__(self, other: "Comparison") -> "Comparison":
        """Return the sum of both comparisons."""
        return Comparison(
            self.blocks + other.blocks, self.missing + other.missing, self.surplus + other.surplus
        )

    @property
    def true_blocks(self) -> int:
        return self.blocks + self.missing - self.surplus

    @property
    def drift(self) -> int:
        return self.missing + self.surplus


class ReplicaAudit(Struct, frozen=True):
    """A replica's comparison of its engine, its own table of blocks and the index."""

    replica_id: str
    incarnation: str
    seq: Count  # number of the replica's latest change
    known: Comparison  # the replica's table, compared with its engine
    index: Comparison  # Redis, compared with the replica's table
    version: int = VERSION
    # The part of `known` that is in host memory.
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
