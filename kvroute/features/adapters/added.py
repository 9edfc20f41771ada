"""LoRA adapters that are added while the cluster runs: their records and keys.

Routers and replicas use an adapter's key in place of its name (blocks/variants.py).
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvroute.blocks.variants import DIGEST, NAME
from kvroute.contract.adapters import Adapter
from kvroute.contract.own_names import own_id
from kvroute.contract.records import VERSION, ReplicaRecord, Versioned, check_version

MAX_PATH = 4096  # characters of a path
FEATURE = "adapters"  # name of the feature, which is the key of its data in records
TAKES_ADDED = b"1"  # data in the record of a replica that takes added adapters

Text = Annotated[str, Meta(max_length=MAX_PATH)]


class AddedAdapter(Struct, frozen=True, kw_only=True):
    """The record of an adapter in Redis."""

    name: Annotated[str, Meta(pattern=f"^{NAME}$")]  # clients request it by this name
    path: Text  # absolute path of a folder in PEFT's format, which every machine has
    digest: Annotated[str, Meta(pattern=f"^{DIGEST}$")]  # digest of the folder's two files
    rank: Annotated[int, Meta(ge=1, le=2**20)]  # highest rank of its layers
    tenant: Annotated[str, Meta(max_length=256)] = ""  # only it can use the adapter; empty: all can
    created_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0  # Unix time
    is_warm: bool = False  # whether replicas load it before the first request
    is_leaving: bool = False  # whether it is being removed: routers refuse new requests for it
    version: int = VERSION

    @property
    def id(self) -> str:
        """Return a name that is unique among the adapters of all tenants."""
        return own_name(self.tenant, self.name)

    @property
    def key(self) -> str:
        return f"{self.id}@{self.digest}"

    @property
    def as_adapter(self) -> Adapter:
        """Return the adapter as replicas load it, with its key as its name."""
        return Adapter(name=self.key, path=self.path)


class AdapterFiles(Struct, frozen=True):
    """The result of a check of an adapter's files, and of loading them on one replica."""

    digest: str = ""
    rank: int = 0
    problem: str = ""  # why the adapter cannot be used; empty: it can


def takes_added(record: ReplicaRecord) -> bool:
    """Return whether a replica takes adapters that are added after its start."""
    return FEATURE in record.load.features


def own_name(tenant: str, name: str) -> str:
    """Return the id of a tenant's adapter, so that two tenants can use one name."""
    return own_id(tenant, name) if tenant else name


encode = msgspec.json.Encoder().encode
_adapters = msgspec.json.Decoder(AddedAdapter)
_versions = msgspec.json.Decoder(Versioned)


def decode(packed: bytes) -> AddedAdapter:
    """Decode the record of an adapter. Raises one of DECODE_ERRORS."""
    check_version(_versions, packed)
    return _adapters.decode(packed)


# Functions, because Ray pickles the replica's deployment by value, and decoders cannot be pickled.


def encode_order(adapter: Adapter) -> bytes:
    return msgspec.json.encode((adapter.name, adapter.path))


def decode_order(packed: bytes) -> Adapter:
    """Decode the name and the folder of an adapter. Raises one of DECODE_ERRORS."""
    name, path = msgspec.json.decode(packed, type=tuple[Text, Text])
    return Adapter(name=name, path=path)


def encode_files(files: AdapterFiles) -> bytes:
    return msgspec.json.encode(files)


def decode_files(packed: bytes) -> AdapterFiles:
    """Decode the result of a check. Raises one of DECODE_ERRORS."""
    return msgspec.json.decode(packed, type=AdapterFiles)
