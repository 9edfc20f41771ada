"""Values in Redis that expire after their last use, within a limit of the size of all of them.

Each value has two parts. One can be read without the other. The keys are:

    PREFIX       hash    KEY -> the first part
                         KEY + "r" -> the second part
                         "bytes" -> the sum of all sizes
    PREFIX:ends  zset    KEY -> time of the value's expiry, Unix time in ms

KEY is a digest of an id and its owner's salt. So a value can only be found with the salt, which is
not in Redis.
"""

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import redis.asyncio as redis

from kvroute.contract.unreadable import Unreadable, UnreadableError
from kvroute.features.gate import Caller
from kvroute.features.responses.response_options import ResponseOptions
from kvroute.features.responses.stores.leased_scripts import DELETE, GET, PUT
from kvroute.store.connection import ModelStore

if TYPE_CHECKING:
    from kvroute.router.serving.router_base import RouterBase

KEY_BYTES = 16  # size of a KEY
OVERHEAD = 320  # bytes of Redis's memory that a value takes besides its two parts
LARGEST_SHARE = 16  # one value may take at most 1/16 of the limit for all values
MAX_REMOVED = 1000  # maximum values that one script removes, which takes some milliseconds
CONNECTIONS = 16  # how many of the router's 100 connections to Redis these scripts may use at once
INLINE_BYTES = 32 << 10  # up to this size, compress on the event loop: that takes up to about 1 ms
ZLIB_FACTOR = 4  # how many times smaller zlib is assumed to make JSON
LEVEL = 1  # compression level: three times as fast as zlib's default, and nearly as small

FIRST, SECOND = "", "r"  # ends of the names of the hash's fields with these parts
# known: there is such a value already, or the value to replace has changed.
Written = Literal["stored", "too_large", "known"]

T = TypeVar("T")


class TooLongError(Exception):
    """The values have too many bytes, or are too many."""


@dataclass(eq=False, repr=False, kw_only=True)
class LeasedStore(ModelStore):
    """Values of one kind; the base of the stores that give the two parts a meaning.

    All methods raise RedisError or OSError if Redis is unreachable. Unreadable data in Redis is
    counted, and does not make them raise an error.
    """

    NAME: ClassVar[str]  # name of the values in their key

    unreadable: Unreadable
    limit_bytes: int  # limit of the size of all values in Redis
    ttl_s: float  # seconds until a value expires, after its last use
    max_bytes: int  # limit of the size of what one value holds, as JSON

    def __post_init__(self) -> None:
        super().__post_init__()
        self.bytes = 0  # size of all values after the latest `put_value`
        self.evicted = 0  # number of values that this process removed before they expired
        self._ttl_ms = max(1, round(1000 * self.ttl_s))
        self._connections = asyncio.Semaphore(CONNECTIONS)
        prefix = f"{self._prefix}:{self.NAME}"
        self._keys = [prefix, f"{prefix}:ends"]
        self._put_script: Any = self.client.register_script(PUT)
        self._get_script: Any = self.client.register_script(GET)
        self._delete_script: Any = self.client.register_script(DELETE)

    @classmethod
    def opened(
        cls, base: "RouterBase", options: ResponseOptions, client: redis.Redis, model: str = ""
    ) -> Self:
        """Return the store of one model in a router; empty: the values are the whole cluster's."""
        return cls(
            client,
            model,
            cluster=base.cluster,
            unreadable=base.unreadable,
            limit_bytes=options.response_store_mb << 20,
            ttl_s=options.response_ttl_s,
            max_bytes=base.settings.max_body_mb << 20,
        )

    async def put_value(
        self, key: bytes, first: bytes, second: bytes, *, replaced: bytes = b""
    ) -> Written:
        """Store a value. The least recently used values are removed until it fits.

        Args:
            replaced: the first part of the value that this one replaces; empty: there must not be
                a value with this key.
        """
        if (len(first) + len(second) + OVERHEAD) * LARGEST_SHARE > self.limit_bytes:
            return "too_large"
        while True:
            outcome, self.bytes, evicted = await self.run(
                self._put_script, key, first, second, self.limit_bytes, MAX_REMOVED, replaced
            )
            self.evicted += evicted
            if outcome != b"more":
                return "stored" if outcome == b"stored" else "known"

    async def get_value(self, key: bytes) -> tuple[bytes, bytes] | None:
        """Return both parts of a value, and extend its lease; None if there is no such value."""
        found: list[bytes] | None = await self.run(self._get_script, key, FIRST, SECOND)
        return None if found is None or None in found else (found[0], found[1])

    async def part(self, key: bytes, suffix: str) -> bytes | None:
        """Return a part of a value, FIRST or SECOND, and extend its lease; None: it is missing."""
        found: list[bytes | None] | None = await self.run(self._get_script, key, suffix)
        return found[0] if found else None

    async def delete_value(self, key: bytes) -> bool:
        """Delete a value; return whether there was one."""
        return bool(await self.run(self._delete_script, key))

    async def run(self, script: Any, key: bytes, *more: object) -> Any:
        """Run a script for the value with this key, with more arguments."""
        args = [key, self._ttl_ms, OVERHEAD, *more]
        async with self._connections:
            return await script(keys=self._keys, args=args)


def owner(caller: Caller, cache_salt: str | None) -> str:
    """Return the salt of what a caller stores with this `cache_salt`, and may read."""
    salt = cache_salt or ""
    return f"{caller.secret}.{salt}" if caller.tenant else salt


def key(id_: str, salt: str) -> bytes:
    """Return the key of a value, which is different for each pair of id and salt."""
    salted = blake2b(salt.encode(errors="surrogatepass")).digest()
    return blake2b(id_.encode(errors="surrogatepass"), key=salted, digest_size=KEY_BYTES).digest()


async def packed(data: bytes) -> bytes:
    """Compress a part of a value, in a thread if it is large."""
    if len(data) <= INLINE_BYTES:
        return zlib.compress(data, LEVEL)
    return await asyncio.to_thread(zlib.compress, data, LEVEL)


async def unpacked(
    unpack: Callable[[Sequence[bytes], int], T], parts: Sequence[bytes], max_bytes: int
) -> T:
    """Call `unpack`, in a thread if the parts are large.

    Raises:
        TooLongError: the parts have more than `max_bytes`.
        DECODE_ERRORS: the parts cannot be read.
    """
    if sum(map(len, parts)) <= INLINE_BYTES // ZLIB_FACTOR:
        return unpack(parts, max_bytes)
    return await asyncio.to_thread(unpack, parts, max_bytes)


def decompressed(part: bytes, max_bytes: int) -> bytes:
    """Return a part as it was before it was compressed.

    Raises:
        TooLongError: it has more than `max_bytes`.
        UnreadableError: it was not compressed by `packed`.
    """
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(part, max(1, max_bytes))
    except zlib.error as error:
        raise UnreadableError(str(error)) from None
    if stream.unconsumed_tail:
        raise TooLongError
    return data
