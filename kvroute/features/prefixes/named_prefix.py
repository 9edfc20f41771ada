"""A named prefix: the beginning of prompts, which a client declares under an id.

This module has its declaration, its format in Redis, and the choice of the replicas that keep it
warm, that is, in their caches.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvroute.blocks.tiers import GPU, HOST, Tier
from kvroute.contract.own_names import TENANT_SEPARATOR
from kvroute.contract.records import VERSION, AtLeastOne, Versioned, check_version
from kvroute.contract.unreadable import UnreadableError, text

MAX_TENANT = 256  # maximum number of characters in a tenant's name or salt


@dataclass(frozen=True, slots=True)
class Prefix:
    """One version of a named prefix. Its token ids never change."""

    id: str  # the id that clients send (the number 1 is "1"); see own_id() for a tenant's prefixes
    version: int  # starts at 1; each new declaration of the id adds 1
    token_ids: NDArray[np.uint32] = field(compare=False, repr=False)  # shape (n,)
    source: Mapping[str, Any] = field(repr=False)  # {"prompt": str} or {"messages": [...]}
    replicas: int | None = None  # how many replicas keep it warm; None: all
    is_pinned: bool = True  # False: replicas compute it, but may evict it
    expires_at_s: float | None = None  # Unix time; None: never
    tenant: str = ""  # the tenant whose API key declared it; empty: declared without a key
    namespace: str = ""  # the tenant's cache salt: requests with this salt reuse it; empty: no salt
    is_shared: bool = False  # True: requests of all namespaces reuse its full blocks
    is_in_host: bool = False  # True: it is pinned in host memory, not in GPU memory

    @property
    def tier(self) -> Tier:
        """Return the tier, that is, the kind of memory, in which replicas pin the prefix."""
        return HOST if self.is_in_host else GPU

    @property
    def label(self) -> str:
        """Return the id without the tenant's name, as the tenant's clients send it."""
        return self.id.rpartition(TENANT_SEPARATOR)[2]

    @property
    def name(self) -> str:
        return f"{self.id}@{self.version}"

    def full_blocks(self, block_size: int) -> int:
        """Return the number of full blocks. Only these are cached and reused."""
        return len(self.token_ids) // block_size

    def full_tokens(self, block_size: int) -> int:
        """Return the number of tokens in the full blocks."""
        return self.full_blocks(block_size) * block_size

    def is_expired(self, now_s: float) -> bool:
        return self.expires_at_s is not None and self.expires_at_s <= now_s


class PrefixMessage(msgspec.Struct):
    """The fields of a chat message that are checked; other fields are allowed."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class Source(msgspec.Struct):
    """The text of a declaration, as the client sent it. Exactly one of the fields is set."""

    prompt: str | None = None
    messages: list[PrefixMessage] | None = None


class PrefixTerms(msgspec.Struct, frozen=True, kw_only=True):
    """A declaration without its token ids, as stored in Redis."""

    order: Annotated[int, msgspec.Meta(ge=0, le=2**60)]  # later declarations have higher numbers
    source: dict[str, Any]  # the fields of a Source, and all other fields that the client sent
    replicas: AtLeastOne | None = None
    is_pinned: bool = True
    expires_at_s: Annotated[float, msgspec.Meta(ge=0, le=1e12)] | None = None
    tenant: Annotated[str, msgspec.Meta(max_length=MAX_TENANT)] = ""
    namespace: Annotated[str, msgspec.Meta(max_length=MAX_TENANT)] = ""
    is_shared: bool = False
    is_in_host: bool | msgspec.UnsetType = msgspec.UNSET  # left out unless it is True
    version: int = VERSION


class PrefixKey(NamedTuple):
    """The two parts of a prefix's name."""

    id: str
    version: int

    @classmethod
    def parse(cls, name: bytes) -> "PrefixKey":
        """Split ID@VERSION. Raises UnreadableError."""
        id_, _, version = text(name).rpartition("@")
        if not (id_ and version.isdecimal() and version.isascii() and len(version) < 10):
            raise UnreadableError("its name is not ID@VERSION")
        return cls(id_, int(version))


_terms = msgspec.json.Decoder(PrefixTerms)
_versions = msgspec.json.Decoder(Versioned)


def shared_tokens(
    token_ids: NDArray[np.uint32], shared: Iterable[Prefix], block_size: int, now_s: float
) -> int:
    """Return the length of the longest shared prefix with which the prompt begins, in tokens.

    Only the full blocks of a prefix are compared and counted, and only of one that has not expired.
    """
    longest = 0
    for prefix in shared:
        full = prefix.full_tokens(block_size)
        is_longer = longest < full <= len(token_ids) and not prefix.is_expired(now_s)
        if is_longer and _begins(prefix.token_ids, token_ids, full):
            longest = full
    return longest


def _begins(ids: NDArray[np.uint32], others: NDArray[np.uint32], tokens: int) -> bool:
    # Most prefixes differ in the first or the last token, so these are compared first. Comparing
    # all tokens of a thousand prefixes would take milliseconds.
    last = tokens - 1
    is_candidate = ids[0] == others[0] and ids[last] == others[last]
    return bool(is_candidate) and np.array_equal(ids[:tokens], others[:tokens])


def assigned(prefix: Prefix, replica_ids: Iterable[str]) -> list[str]:
    """Return which of the live replicas keep the prefix warm, by rendezvous hashing.

    Every process that knows the same replicas gets the same result. If a replica joins or leaves,
    few prefixes move between the other replicas. A new version stays on the same replicas.
    """
    ranked = sorted(replica_ids, key=lambda replica_id: _rank(prefix.id, replica_id), reverse=True)
    if prefix.replicas is None:
        return ranked
    return ranked[: prefix.replicas]


def _rank(prefix_id: str, replica_id: str) -> tuple[int, str]:
    return xxh3_64_intdigest(f"{prefix_id}\0{replica_id}".encode()), replica_id


# Two declarations are equal if their token ids and these fields are equal.
DECLARED = ("source", "replicas", "is_pinned", "is_in_host", "tenant", "namespace", "is_shared")


def is_same(first: Prefix, second: Prefix) -> bool:
    """Return whether two declarations are equal. Versions and expiries may differ."""
    return np.array_equal(first.token_ids, second.token_ids) and all(
        getattr(first, name) == getattr(second, name) for name in DECLARED
    )


def terms_of(prefix: Prefix, *, order: int) -> PrefixTerms:
    """Return the declaration of a prefix, without its tokens."""
    return PrefixTerms(
        order=order,
        source=dict(prefix.source),
        replicas=prefix.replicas,
        is_pinned=prefix.is_pinned,
        expires_at_s=prefix.expires_at_s,
        tenant=prefix.tenant,
        namespace=prefix.namespace,
        is_shared=prefix.is_shared,
        is_in_host=prefix.is_in_host or msgspec.UNSET,
    )


def decode_terms(packed: bytes) -> PrefixTerms:
    """Decode a declaration. Raises one of DECODE_ERRORS."""
    check_version(_versions, packed)
    terms = _terms.decode(packed)
    source = msgspec.convert(terms.source, Source)
    if (source.prompt is None) == (source.messages is None):
        raise UnreadableError("its source must be either a prompt or messages")
    return terms
