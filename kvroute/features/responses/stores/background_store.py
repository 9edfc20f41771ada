"""Responses that run in the background, in Redis, so that any router can run and show them.

They are leased values (leased_values.py): kvroute:{CLUSTER/}:background. The first part of a value
is a Head, the second part a BackgroundBody; both are JSON, compressed with zlib. The events of a
response are more values, each with some events in its second part.

    kvroute:{CLUSTER/}:background:open   hash   KEY of a response that has not ended -> its tenant
"""

import re
from hashlib import blake2b
from typing import Literal

import msgspec

from kvroute.contract.priority import Priority
from kvroute.contract.records import VERSION, Count, Name, Versioned, check_version, encode
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.responses import RESPONSE
from kvroute.features.responses.stores.leased_values import (
    FIRST,
    KEY_BYTES,
    SECOND,
    LeasedStore,
    TooLongError,
    Written,
    decompressed,
    packed,
)
from kvroute.store.connection import SharedClock, with_timeout

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
OPEN: tuple[Status, ...] = ("queued", "in_progress")  # statuses that are not final
HEX = re.compile(rb"[0-9a-f]{%d}" % (2 * KEY_BYTES))
LARGEST = 8  # limit of a value's parts, in multiples of the largest body


class Head(msgspec.Struct, frozen=True):
    """The state of a response, which its router writes again and again."""

    status: Status
    chunks: Count = 0  # number of values with its events
    events: Count = 0  # number of its events so far; the next one has this number
    router: Name = ""  # id of the router that runs it; empty: none does
    beats: Count = 0  # rises with each write, which shows that the router is alive
    attempts: Count = 0  # how many routers have begun to run it
    version: int = VERSION

    @property
    def is_open(self) -> bool:
        """Return whether the response has not ended."""
        return self.status in OPEN


class BackgroundBody(msgspec.Struct, frozen=True):
    """What a response is made of."""

    id: str
    tenant: str  # owner of the API key; empty: the cluster has no keys
    priority: Priority  # the most urgent priority of the tenant's key
    headers: dict[str, str]  # the request's headers that may matter for its answer
    created_at: Count  # Unix time in seconds
    request: msgspec.Raw  # the request's body, a JSON object
    response: msgspec.Raw  # the latest response object


class Record(msgspec.Struct, frozen=True):
    """A response as it was read or written."""

    key: bytes
    head: Head
    first: bytes  # the value's parts in Redis
    second: bytes

    def body(self, max_bytes: int) -> BackgroundBody:
        """Return what the response is made of. Raises DECODE_ERRORS or TooLongError."""
        return _bodies.decode(decompressed(self.second, max_bytes))


_heads = msgspec.json.Decoder(Head)
_bodies = msgspec.json.Decoder(BackgroundBody)
_versions = msgspec.json.Decoder(Versioned)


class BackgroundStore(LeasedStore):
    """The background responses of one cluster, and their events.

    Here, `max_bytes` is the most bytes of a request's body.
    """

    NAME = "background"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.max_part_bytes = LARGEST * self.max_bytes
        self._open = f"{self._prefix}:{self.NAME}:open"
        self.clock = SharedClock()  # updated with each read of the open responses

    @with_timeout
    async def create(self, key: bytes, head: Head, body: BackgroundBody) -> Record | Written:
        """Store a new response, and list it among those that have not ended."""
        record = Record(key, head, await packed(encode(head)), await packed(encode(body)))
        written = await self.put_value(key, record.first, record.second)
        if written != "stored":
            return written
        await self._redis.hset(self._open, key.hex(), body.tenant)
        return record

    @with_timeout
    async def read(self, key: bytes) -> Record | None:
        """Return a response; None if it is missing, expired or unreadable."""
        if not (parts := await self.get_value(key)):
            return None
        head = self._head(key, parts[0])
        return None if head is None else Record(key, head, *parts)

    @with_timeout
    async def head(self, key: bytes) -> Head | None:
        """Return the state of a response without its body; None as from `read`."""
        first = await self.part(key, FIRST)
        return None if first is None else self._head(key, first)

    def _head(self, key: bytes, first: bytes) -> Head | None:
        try:
            data = decompressed(first, self.max_part_bytes)
            check_version(_versions, data)
            return _heads.decode(data)
        except (*DECODE_ERRORS, TooLongError) as error:
            self.unreadable.add(RESPONSE, key.hex(), error)
            return None

    @with_timeout
    async def replace(
        self, old: Record, head: Head, body: BackgroundBody | None = None
    ) -> Record | None:
        """Write a response again.

        Args:
            old: the response as it was read or written before.
            body: its new body; None: the body stays the same.

        Returns:
            The response as written. None: another process has changed it, or it has expired.

        Raises:
            TooLongError: it is too large.
        """
        second = old.second if body is None else await packed(encode(body))
        new = Record(old.key, head, await packed(encode(head)), second)
        written = await self.put_value(old.key, new.first, second, replaced=old.first)
        if written == "too_large":
            raise TooLongError
        if written != "stored":
            return None
        if not head.is_open:
            await self._redis.hdel(self._open, old.key.hex())
        return new

    @with_timeout
    async def delete(self, key: bytes) -> bool:
        """Delete a response; return whether there was one. Its events expire."""
        await self._redis.hdel(self._open, key.hex())
        return await self.delete_value(key)

    @with_timeout
    async def put_events(self, key: bytes, number: int, events: bytes) -> bool:
        """Store events of a response; return whether they were not too large.

        Args:
            number: counts the values with its events, from 0.
            events: the events, as a stream has them.
        """
        place, second = _chunk_key(key, number), await packed(events)
        return await self.put_value(place, b"", second) != "too_large"

    @with_timeout
    async def events(self, key: bytes, number: int) -> bytes | None:
        """Return the events of a response that were stored with this number, if they are there."""
        packed_events = await self.part(_chunk_key(key, number), SECOND)
        try:
            return (
                None if packed_events is None else decompressed(packed_events, self.max_part_bytes)
            )
        except (*DECODE_ERRORS, TooLongError) as error:
            self.unreadable.add(RESPONSE, key.hex(), error)
            return None

    @with_timeout
    async def open(self) -> dict[bytes, str]:
        """Return the keys of all responses that have not ended, and the tenant of each."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hgetall(self._open)
        pipeline.time()
        found, reading = await pipeline.execute()
        self.clock.update(reading)
        return {
            bytes.fromhex(name.decode()): tenant.decode(errors="replace")
            for name, tenant in found.items()
            if HEX.fullmatch(name)
        }

    @with_timeout
    async def forget(self, key: bytes) -> None:
        """Take a response that has expired or ended off the list of those that have not ended."""
        await self._redis.hdel(self._open, key.hex())


def _chunk_key(key: bytes, number: int) -> bytes:
    return blake2b(b"%d" % number, key=key, digest_size=KEY_BYTES).digest()
