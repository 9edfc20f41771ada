"""The values in the index: records, changes, and positions in the stream.

This module decodes them. index.py lists their keys and formats in Redis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvroute.blocks.fingerprint import Fingerprint, unpack
from kvroute.contract.records import (
    ReplicaRecord,
    decode_description,
    decode_load,
)
from kvroute.contract.unreadable import UnreadableError, text

SEQ_DIGITS = 18  # maximum number of digits in a `seq`; longer numbers are unreadable


class Position(NamedTuple):
    """A position in the stream of changes; later positions are greater."""

    at_ms: int  # time of the change on Redis's clock
    number: int  # number of the change among the changes of that millisecond

    @classmethod
    def parse(cls, entry_id: bytes) -> "Position":
        at_ms, number = entry_id.split(b"-")
        return cls(int(at_ms), int(number))

    def __str__(self) -> str:
        return f"{self.at_ms}-{self.number}"


START = Position(0, 0)  # a position before all changes
END = Position(2**64 - 1, 2**64 - 1)  # a position after all changes


@dataclass(frozen=True, slots=True)
class WriterState:
    """The state that a replica's writer expects in Redis; every write checks it."""

    replica_id: str
    incarnation: str  # new at every registration
    seq: int = 0  # number of changes since the registration
    blocks: int = 0  # number of blocks in the replica's set
    described: str = field(default="", compare=False, repr=False)  # hex SHA-1 of the description


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of the stream: a change of one replica's blocks, or its arrival or departure."""

    replica_id: str
    incarnation: str
    seq: int
    joined: bool = False  # the replica has registered, and holds no blocks yet
    left: bool = False  # the replica has shut down
    cleared: bool = False  # all blocks were removed before the blocks in `added` were added
    added: tuple[Fingerprint, ...] = ()
    removed: tuple[Fingerprint, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockSet:
    """A replica's set of blocks at one moment."""

    seq: int  # number of the last change that the set includes
    position: Position  # the stream's end at that moment: later changes are not included
    packed: bytes  # the blocks' fingerprints, 8 bytes each

    @property
    def blocks(self) -> tuple[Fingerprint, ...]:
        return unpack(self.packed)


class Records(NamedTuple):
    """The records of all replicas with a valid lease."""

    readable: list[ReplicaRecord]  # replicas with a readable record, ordered by id
    reasons: dict[str, str]  # for replicas with an unreadable record: id -> why it is unreadable


def decode_record(
    model: str, replica_id: str, fields: Sequence[bytes | None] | bytes
) -> ReplicaRecord | None:
    """Decode a replica's record, or return None if it has expired. Raises one of DECODE_ERRORS.

    Args:
        model: the model that the record must have.
        replica_id: the replica's id.
        fields: the values of the record's hash in the order of scripts.READ, or Redis's error.
    """
    if isinstance(fields, bytes):
        raise UnreadableError(fields.decode(errors="replace"))
    if fields.count(None) == len(fields):
        return None
    incarnation, seq, facts, load = fields
    if incarnation is None or seq is None or facts is None or load is None:
        raise UnreadableError("a field of its record is missing")
    described = decode_description(facts)
    if described.model not in ("", model):
        raise UnreadableError(f"its model is {described.model!r}")
    return ReplicaRecord(
        replica_id,
        text(incarnation),
        decode_seq(seq),
        described.facts,
        decode_load(load),
        described.identity,
        described.whereabouts,
    )


def decode_seq(packed: bytes | None) -> int:
    """Decode `seq`, the number of an incarnation's changes. Raises UnreadableError."""
    if packed is None or not packed.isdigit() or len(packed) > SEQ_DIGITS:
        raise UnreadableError(f"its number of changes is unreadable: {packed!r}"[:100])
    return int(packed)


def decode_change(fields: Mapping[bytes, bytes]) -> Change:
    """Decode an entry of the stream. Raises KeyError or one of unreadable.DECODE_ERRORS."""
    return Change(
        replica_id=text(fields[b"r"]),
        incarnation=text(fields[b"i"]),
        seq=decode_seq(fields[b"s"]),
        joined=b"j" in fields,
        left=b"l" in fields,
        cleared=fields.get(b"c") == b"1",
        added=unpack(fields.get(b"a", b"")),
        removed=unpack(fields.get(b"d", b"")),
    )
