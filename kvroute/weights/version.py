"""The weights that a model has, if they are updated while the cluster runs.

Each update has a *key*: its name and a number that no other update has. The key is part of the root
of all fingerprints, and of the format of blocks that replicas exchange. So blocks of different
weights never match, even if two updates have the same name. The key of the weights with which a
model was started is empty.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from kvroute.adapters.added import MAX_PATH, Text
from kvroute.contract.records import VERSION, AtLeastOne, Versioned, check_version

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"  # the names that weights can have
NUMBER_DIGITS = 18  # maximum number of digits in the number of an update
MAX_PROBLEM = 2000  # characters of the reason why weights cannot be loaded


class Weights(Struct, frozen=True, kw_only=True):
    """Weights that replace those of the start."""

    name: Annotated[str, Meta(pattern=f"^{NAME}$")]  # an operator's name, such as step-1200
    number: Annotated[int, Meta(ge=0, lt=10**NUMBER_DIGITS)]  # new for each update
    source: Text  # absolute path of a folder with safetensors files, which every machine has
    created_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0  # Unix time

    @property
    def key(self) -> str:
        return f"{self.name}@{self.number}"


class Failure(Struct, frozen=True, kw_only=True):
    """The last update that replicas could not load."""

    weights: Weights
    problem: Annotated[str, Meta(max_length=MAX_PROBLEM)]


class FleetWeights(Struct, frozen=True, kw_only=True):
    """The record in Redis: the weights that all replicas of a model should have."""

    current: Weights | None  # None: those of the start
    previous: Weights | None = None  # replicas go back to these if the current ones do not load
    is_proven: bool = False  # whether some replica has loaded the current weights
    at_once: AtLeastOne = 1  # replicas that may load at the same time, once the weights are proven
    failure: Failure | None = None  # None: the last update has not failed
    version: int = VERSION

    @property
    def key(self) -> str:
        return self.current.key if self.current else ""

    @property
    def proven(self) -> "FleetWeights":
        """Return the record that a starting replica follows: its weights can be loaded."""
        return self if self.is_proven else replace(self, current=self.previous)


class ReplicaProblem(Struct, frozen=True, kw_only=True):
    """Why a replica cannot load weights that another replica has loaded."""

    key: str  # the key of these weights; empty: those of the start
    problem: Annotated[str, Meta(max_length=MAX_PROBLEM)]
    version: int = VERSION


START = FleetWeights(current=None, is_proven=True)  # the record of a fleet without any update

# Functions, because Ray pickles the replica's deployment by value, and decoders cannot be pickled.


def encode(record: FleetWeights) -> bytes:
    return msgspec.json.encode(record)


def decode(packed: bytes) -> FleetWeights:
    """Decode the record of a fleet's weights. Raises one of DECODE_ERRORS."""
    check_version(msgspec.json.Decoder(Versioned), packed)
    return msgspec.json.decode(packed, type=FleetWeights)


def encode_problem(problem: ReplicaProblem) -> bytes:
    return msgspec.json.encode(problem)


def decode_problem(packed: bytes) -> ReplicaProblem:
    """Decode why a replica cannot load weights. Raises one of DECODE_ERRORS."""
    check_version(msgspec.json.Decoder(Versioned), packed)
    return msgspec.json.decode(packed, type=ReplicaProblem)


def name_in(key: str) -> str:
    """Return the name in the key of an update; empty: the weights of the start."""
    return key.rpartition("@")[0]


def number_in(key: str) -> int:
    """Return the number in the key of an update; 0: the weights of the start."""
    return int(key.rpartition("@")[2] or 0)


def encode_source(path: str) -> bytes:
    return path[:MAX_PATH].encode()


def decode_source(packed: bytes) -> str:
    return packed.decode()
