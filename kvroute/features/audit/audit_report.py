"""The result of an audit in a replica, as the replica sends it to a router."""

import msgspec
from msgspec import Struct

from kvroute.contract.comparison import Comparison
from kvroute.contract.records import VERSION, Count, Versioned, check_version


class ReplicaAudit(Struct, frozen=True):
    """How far the block table of a rank and the index in Redis are correct."""

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


def decode_audit(answer: bytes) -> ReplicaAudit:
    """Decode a replica's answer. Raises one of unreadable.DECODE_ERRORS."""
    check_version(_versions, answer)
    return _audits.decode(answer)
