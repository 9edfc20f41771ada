"""Stored responses of the Responses API. Each response has a link to the response before it.

The keys have the same hash tag as the index (index.py):

    kvroute:{TAG}:responses       hash    KEY -> previous response's KEY, then JSON of a StoredTurn
                                          KEY + "r" -> JSON of the response
                                          "bytes" -> the sum of all sizes
    kvroute:{TAG}:responses:ends  zset    KEY -> time of its expiry, Unix time in ms

KEY is a digest of a response's id and its owner's salt. So a response can only be found with the
salt, which is not in Redis. JSON is compressed with zlib. A StoredTurn has what the response adds
to its conversation. To read a conversation, only these are read: the responses are larger, since
each one repeats the conversation's tools.
"""

import asyncio
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Literal, TypeVar, get_args

import msgspec
import redis.asyncio as redis

from kvroute.contract.records import VERSION, Count, Versioned, check_version, encode
from kvroute.contract.unreadable import DECODE_ERRORS, Unreadable, UnreadableError
from kvroute.store.connection import with_timeout
from kvroute.store.keys import DEFAULT_CLUSTER, key_prefix
from kvroute.store.response_scripts import DELETE, GET, PUT, READ

KEY_BYTES = 16  # size of a KEY
ROOT = bytes(KEY_BYTES)  # stands for the previous KEY in a conversation's first response
OVERHEAD = 320  # bytes of Redis's memory that a response takes besides its two values
MAX_LINKS = 1000  # maximum number of responses in one conversation
LARGEST_SHARE = 16  # one response may take at most 1/16 of the limit for all responses
MAX_REMOVED = 1000  # maximum responses that one script removes, which takes some milliseconds
CONNECTIONS = 16  # how many of the router's 100 connections to Redis these scripts may use at once
INLINE_BYTES = 32 << 10  # up to this size, compress on the event loop: that takes up to about 1 ms
ZLIB_FACTOR = 4  # how many times smaller zlib is assumed to make JSON
LARGEST_RESPONSE = 4  # limit of a response's JSON, in multiples of max_bytes; it may have logprobs
LEVEL = 1  # compression level: three times as fast as zlib's default, and nearly as small

# known: a response with this id is already stored. failed: Redis failed; the caller counts these.
Outcome = Literal["stored", "too_large", "known", "failed"]

EMPTY = re.compile(rb"\[\s*\]")
T = TypeVar("T")


class TooLongError(Exception):
    """The conversation has more than MAX_LINKS responses, or too many bytes."""


class StoredTurn(msgspec.Struct, frozen=True):
    """The items that one response adds to its conversation: its input and its output."""

    items: msgspec.Raw  # JSON array: the response's input, then its output as input of the next one
    inputs: Count  # how many of the items are the response's input
    count: Count  # number of items
    values: Count  # number of JSON values in the items
    version: int = VERSION


_turns = msgspec.json.Decoder(StoredTurn)
_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])
_versions = msgspec.json.Decoder(Versioned)


class Responses:
    """The stored responses of one model of one cluster.

    All methods raise RedisError or OSError if Redis is unreachable. Unreadable data in Redis does
    not make them raise an error.
    """

    def __init__(
        self,
        client: "redis.Redis",
        model: str,
        *,
        limit_bytes: int,
        ttl_s: float,
        max_bytes: int,
        cluster: str = DEFAULT_CLUSTER,
        unreadable: Unreadable | None = None,
    ) -> None:
        """Create the store's client.

        Args:
            client: the client for Redis.
            model: the model's name.
            limit_bytes: limit of the size of all responses in Redis.
            ttl_s: seconds until a response expires, after its last use.
            max_bytes: limit of the size of one conversation, as JSON.
            cluster: the cluster's id.
            unreadable: counts unreadable responses.
        """
        self.counts = Counter[str](dict.fromkeys(get_args(Outcome), 0))
        self.bytes = 0  # size of all responses after the latest `put`
        self.evicted = 0  # number of responses that this process removed before they expired
        self._limit = limit_bytes
        self._ttl_ms = max(1, round(1000 * ttl_s))
        self._max_bytes = max_bytes
        self._unreadable = unreadable or Unreadable()
        prefix = f"{key_prefix(cluster, model)}:responses"
        self._connections = asyncio.Semaphore(CONNECTIONS)
        self._keys = [prefix, f"{prefix}:ends"]
        self._put: Any = client.register_script(PUT)
        self._read: Any = client.register_script(READ)
        self._get: Any = client.register_script(GET)
        self._delete: Any = client.register_script(DELETE)

    @with_timeout
    async def put(
        self,
        id: str,  # noqa: A002
        salt: str,
        previous_id: str | None,
        turn: StoredTurn,
        response: bytes,
    ) -> Outcome:
        """Store a response and count the outcome.

        The least recently used responses are removed until the new one fits. If a response is
        already stored under the id, that one is kept, and the new one is not stored.

        Args:
            id: the response's id.
            salt: the cache salt of its owner.
            previous_id: id of the previous response; None: this one is the first.
            turn: the items that the response adds to the conversation.
            response: JSON of the response, as the client gets it.
        """
        previous_key = ROOT if previous_id is None else key(previous_id, salt)
        value = previous_key + await _packed(encode(turn))
        outcome = await self._written(key(id, salt), value, await _packed(response))
        self.counts[outcome] += 1
        return outcome

    @with_timeout
    async def conversation(self, id: str, salt: str) -> list[StoredTurn]:  # noqa: A002
        """Return the turns of a conversation up to this response, oldest first.

        The list is empty if a turn is missing, expired or unreadable. The lease of all these
        responses is extended to `ttl_s` from now. Raises TooLongError.
        """
        args = [key(id, salt), self._ttl_ms, OVERHEAD, MAX_LINKS, self._max_bytes]
        values = await self._run(self._read, args)
        if values == b"long":
            raise TooLongError
        try:
            return (await _unpacked(_unpack_turns, values, self._max_bytes))[::-1]
        except DECODE_ERRORS as error:
            self._unreadable.add("response", id, error)
            return []

    @with_timeout
    async def get(self, id: str, salt: str) -> bytes | None:  # noqa: A002
        """Return the JSON of a response; None if it is missing, expired or unreadable.

        Its lease is extended to `ttl_s` from now.
        """
        args = [key(id, salt), self._ttl_ms, OVERHEAD]
        if not (value := await self._run(self._get, args)):
            return None
        try:
            return await _unpacked(_unpack_response, [value], self._max_bytes)
        except (*DECODE_ERRORS, TooLongError) as error:
            self._unreadable.add("response", id, error)
            return None

    @with_timeout
    async def delete(self, id: str, salt: str) -> bool:  # noqa: A002
        """Delete a response; return whether there was one."""
        return bool(await self._run(self._delete, [key(id, salt), 0, OVERHEAD]))

    async def _written(self, key: bytes, value: bytes, response: bytes) -> Outcome:
        if (len(value) + len(response) + OVERHEAD) * LARGEST_SHARE > self._limit:
            return "too_large"
        args = [key, self._ttl_ms, OVERHEAD, value, response, self._limit, MAX_REMOVED]
        while True:
            outcome, self.bytes, evicted = await self._run(self._put, args)
            self.evicted += evicted
            if outcome != b"more":
                return "stored" if outcome == b"stored" else "known"

    async def _run(self, script: Any, args: Sequence[object]) -> Any:
        async with self._connections:
            return await script(keys=self._keys, args=args)


def key(id_: str, salt: str) -> bytes:
    """Return the key of a response, which is different for each pair of id and salt."""
    salted = blake2b(salt.encode(errors="surrogatepass")).digest()
    return blake2b(id_.encode(errors="surrogatepass"), key=salted, digest_size=KEY_BYTES).digest()


async def _packed(data: bytes) -> bytes:
    if len(data) <= INLINE_BYTES:
        return zlib.compress(data, LEVEL)
    return await asyncio.to_thread(zlib.compress, data, LEVEL)


async def _unpacked(
    unpack: Callable[[Sequence[bytes], int], T], values: Sequence[bytes], max_bytes: int
) -> T:
    """Call `unpack`, in a thread if the values are large.

    Raises TooLongError or one of DECODE_ERRORS.
    """
    if sum(map(len, values)) <= INLINE_BYTES // ZLIB_FACTOR:
        return unpack(values, max_bytes)
    return await asyncio.to_thread(unpack, values, max_bytes)


def _unpack_turns(values: Sequence[bytes], max_bytes: int) -> list[StoredTurn]:
    turns, left = [], max_bytes
    for value in values:
        packed = _decompressed(value[KEY_BYTES:], left)
        left -= len(packed)
        check_version(_versions, packed)
        turn = _turns.decode(packed)
        if bytes(memoryview(turn.items)[:1]) != b"[":
            raise UnreadableError("its items are not a JSON array")
        turns.append(turn)
    return turns


def _unpack_response(values: Sequence[bytes], max_bytes: int) -> bytes:
    data = _decompressed(values[0], LARGEST_RESPONSE * max_bytes)
    _objects.decode(data)
    return data


def _decompressed(packed: bytes, max_bytes: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(packed, max(1, max_bytes))
    except zlib.error as error:
        raise UnreadableError(str(error)) from None
    if stream.unconsumed_tail:
        raise TooLongError
    return data


def joined(arrays: Sequence[bytes | msgspec.Raw]) -> bytes:
    """Join JSON arrays into one array, without a copy of each array."""
    insides = [
        memoryview(array)[1:-1] for array in arrays if not EMPTY.fullmatch(memoryview(array))
    ]
    return b"".join((b"[", b",".join(insides), b"]"))
