"""The result of comparing one list of a replica's blocks with another, as replicas report it."""

from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
from msgspec import Struct

from kvroute.contract.records import VERSION, Count, Versioned, check_version
from kvroute.contract.unreadable import UnreadableError


class Comparison(Struct, frozen=True):
    """One list of a replica's blocks, compared with a list that is nearer to the engine."""

    blocks: Count  # in the list
    missing: Count = 0  # from the list
    surplus: Count = 0  # in the list, but wrong

    @classmethod
    def of(cls, account: AbstractSet[Any], truth: AbstractSet[Any]) -> "Comparison":
        return cls(len(account), len(truth - account), len(account - truth))

    def __add__(self, other: "Comparison") -> "Comparison":
        """Both as one list."""
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
    """One replica's blocks according to itself and to the index, after its change `seq`."""

    replica_id: str
    incarnation: str
    seq: Count
    known: Comparison  # the replica's table, compared with its engine
    index: Comparison  # Redis, compared with the replica's table
    version: int = VERSION
    in_host: Comparison | msgspec.UnsetType = msgspec.UNSET  # the part of `known` in host memory


_versions = msgspec.json.Decoder(Versioned)
_audits = msgspec.json.Decoder(ReplicaAudit)


def encode_audit(audit: ReplicaAudit) -> bytes:
    return msgspec.json.encode(audit)


def decode_audit(answer: object) -> ReplicaAudit:
    """Raises one of unreadable.DECODE_ERRORS."""
    if not isinstance(answer, bytes):  # from a replica of another version
        raise UnreadableError(f"it is a {type(answer).__name__}")
    check_version(_versions, answer)
    return _audits.decode(answer)
