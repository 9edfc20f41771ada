"""The index in Redis: which replica holds which KV cache blocks.

A block is stored as its fingerprint: a hash of its tokens and of all tokens before it. Only this
module knows the keys of the index, and only index_values.py decodes the values.

All keys of one model of one cluster share a hash tag, so they are on one node of a Redis Cluster.
TAG is CLUSTER/MODEL. The characters %, { and } are escaped as in a URL. In CLUSTER, / is escaped
too.

    kvroute:{TAG}:replicas              set     ids of replicas; removed when they have no lease
    kvroute:{TAG}:replica:ID            hash    incarnation, seq, facts, load; leased. facts and
                                                load: JSON of records.Description and Load
    kvroute:{TAG}:blocks:ID:INCARNATION set     8-byte fingerprints; leased
    kvroute:{TAG}:router-ids            set     ids of routers; removed when they have no lease
    kvroute:{TAG}:router:ID             string  JSON of records.RouterDescription; leased
    kvroute:{TAG}:routers               channel msgpack of messages.RouterMessage
    kvroute:{TAG}:changes               stream  r (replica), i (incarnation), s (seq), and one of: j
                                                (joined); l (left); c, a and d (cleared, added,
                                                removed) together
    kvroute:clusters                    zset    all clusters that use this Redis: clusters.py

A leased key expires unless its writer renews it. Each registration of a replica starts a new
incarnation, whose changes are numbered from 0 (seq). Every write is a script that checks the state
that the writer expects: incarnation, seq and number of blocks. Redis may have a different state,
because of another writer, an expired lease, an evicted set, or an older snapshot that was restored.
Then the write is fenced: it changes nothing, and the writer registers again. All keys expire with
the last lease. Other modules of this package list the keys for other data, such as prefixes.py.

Unreadable data (of another version or cluster, or garbage) is skipped and counted in
`Index.unreadable`. A key of another type is replaced when its writer registers again.
"""

import hashlib
from collections.abc import (
    AsyncIterator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from typing import Any

from kvroute.blocks.fingerprint import Fingerprint, pack
from kvroute.contract.records import (
    Description,
    Load,
    ReplicaRecord,
    RouterDescription,
    decode_router,
    encode,
)
from kvroute.contract.unreadable import DECODE_ERRORS, Kind, UnreadableError, text
from kvroute.store import scripts
from kvroute.store.connection import ModelStore, with_timeout
from kvroute.store.index_values import (
    START,
    BlockSet,
    Change,
    Position,
    Records,
    WriterState,
    decode_change,
    decode_record,
    decode_seq,
)

BATCH_BLOCKS = 5000  # maximum fingerprints in one change; limits the time of one script in Redis
# Maximum age in milliseconds and maximum number of the stream's entries, both approximate. A reader
# that is further behind reads all block sets again. Each stored or evicted block takes 8 bytes, and
# each change about 150 bytes: 55 MB if 100 replicas change 2,000 blocks/s each. In a stress test,
# writers reached 2.5 million blocks/s on a Redis with two cores. At this rate, the entries of
# STREAM_MS would take 0.6 GB.
STREAM_MS = 30_000
STREAM_CHANGES = 50_000
READ_CHANGES = 500  # maximum number of changes that `follow` reads at once
READ_RECORDS = 100  # maximum number of records in one read, which takes a router about 2 ms


class FencedError(Exception):
    """Redis does not have the state that the writer expects; the writer must register again."""


class Index(ModelStore):
    """The index of one model of one cluster.

    All methods raise RedisError or OSError if Redis is unreachable. Unreadable data in Redis does
    not make a read raise an error.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._changes = f"{self._prefix}:changes"
        self._replicas = f"{self._prefix}:replicas"
        self._routers = f"{self._prefix}:routers"
        self._router_ids = f"{self._prefix}:router-ids"
        self._register = self._redis.register_script(scripts.REGISTER)
        self._change = self._redis.register_script(scripts.CHANGE)
        self._renew = self._redis.register_script(scripts.RENEW)
        self._leave = self._redis.register_script(scripts.LEAVE)
        self._snapshot = self._redis.register_script(scripts.SNAPSHOT)
        self._read = self._redis.register_script(scripts.READ)
        self._announce = self._redis.register_script(scripts.ANNOUNCE)

    # The write path: methods for one replica.

    @with_timeout
    async def register(
        self,
        replica_id: str,
        incarnation: str,
        *,
        replaces: bool = True,
        description: Description,
        load: Load,
        lease_s: float,
    ) -> WriterState:
        """Add the replica as a new incarnation without blocks.

        From then on, every write of an older incarnation raises FencedError.

        Raises:
            FencedError: `replaces` is False, and the id has a record with a valid lease.
        """
        facts = encode(description)
        writer_state = WriterState(
            replica_id, incarnation, described=hashlib.sha1(facts).hexdigest()
        )
        arguments = [facts, encode(load), "1" if replaces else "", *_stream_limits()]
        await self._write(self._register, writer_state, lease_s, arguments)
        return writer_state

    @with_timeout
    async def change(
        self,
        writer_state: WriterState,
        *,
        cleared: bool = False,
        added: Iterable[Fingerprint] = (),
        removed: Iterable[Fingerprint] = (),
        lease_s: float,
    ) -> WriterState:
        """Write a change to the replica's set of blocks and to the stream. Raises FencedError."""
        arguments = ["1" if cleared else "", pack(added), pack(removed), *_stream_limits()]
        blocks = await self._write(self._change, writer_state, lease_s, arguments)
        return replace(writer_state, seq=writer_state.seq + 1, blocks=blocks)

    @with_timeout
    async def renew(self, writer_state: WriterState, *, load: Load, lease_s: float) -> None:
        """Renew the lease, and write the load to the record. Raises FencedError."""
        arguments = [encode(load), writer_state.described]
        await self._write(self._renew, writer_state, lease_s, arguments)

    @with_timeout
    async def leave(self, replica_id: str, incarnation: str) -> None:
        """Remove this incarnation of the replica, even if its lease has expired."""
        await self._leave(
            keys=self._keys(replica_id, incarnation),
            args=[incarnation, replica_id, STREAM_CHANGES],
        )

    # The read path: methods for a router.

    @with_timeout
    async def check_writes(self) -> None:
        """Raise RedisError if Redis accepts no writes.

        Redis accepts none if it is a replica of another Redis, if its memory is full, or if it
        cannot save to its disk. The check is a write that changes nothing.
        """
        await self._redis.setrange(f"{self._prefix}:probe", 0, "")

    @with_timeout
    async def position(self) -> Position:
        """Return the end of the stream. `follow` from this position returns every later change."""
        return _end(await self._redis.xrevrange(self._changes, count=1))

    @with_timeout
    async def records(self) -> list[ReplicaRecord]:
        """Return the replicas with a valid lease and a readable record."""
        return (await self.all_records()).readable

    @with_timeout
    async def all_records(self) -> "Records":
        """Return the replicas with a valid lease; remove the ids of all others from Redis."""
        ids = await self._ids(self._replicas, "replica")
        readable, reasons, expired = list[ReplicaRecord](), dict[str, str](), list[str]()
        for begin in range(0, len(ids), READ_RECORDS):
            batch = ids[begin : begin + READ_RECORDS]
            records = await self._read(keys=list(map(self._record_key, batch)))
            for replica_id, fields in zip(batch, records, strict=True):
                record = self._record(replica_id, fields)
                if record is None:
                    expired.append(replica_id)
                elif isinstance(record, str):
                    reasons[replica_id] = record
                else:
                    readable.append(record)
        if expired:
            # If a replica has renewed its lease meanwhile, its next renewal adds its id again.
            await self._redis.srem(self._replicas, *expired)
        return Records(readable, reasons)

    @with_timeout
    async def replica_status(self) -> tuple[list[ReplicaRecord], dict[str, int]]:
        """Return the replicas with a valid lease, and how many blocks the index has of each."""
        records = await self.records()
        return records, await self.counts(records)

    @with_timeout
    async def counts(self, records: Sequence[ReplicaRecord]) -> dict[str, int]:
        """Return how many blocks the index has of each of these replicas, by replica id."""
        pipeline = self._redis.pipeline(transaction=False)
        for record in records:
            pipeline.scard(self._blocks_key(record.id, record.incarnation))
        counts = await pipeline.execute(raise_on_error=False)
        pairs = zip(records, counts, strict=True)
        return {record.id: count for record, count in pairs if isinstance(count, int)}

    @with_timeout
    async def record(self, replica_id: str) -> ReplicaRecord | None:
        """Return the record of a replica, or None if there is no readable record."""
        (fields,) = await self._read(keys=[self._record_key(replica_id)])
        record = self._record(replica_id, fields)
        return None if isinstance(record, str) else record

    @with_timeout
    async def blocks(self, record: ReplicaRecord) -> BlockSet:
        """Return a replica's current blocks. Raises FencedError if the record is outdated."""
        keys = self._keys(record.id, record.incarnation)
        reply = await self._snapshot(keys=keys, args=[record.incarnation])
        if reply is None:
            raise FencedError(f"replica {record.id} is no longer incarnation {record.incarnation}")
        seq, packed, last, foreign = reply
        if foreign:
            reason = f"{foreign} members of its set are not fingerprints"
            self.unreadable.add("blocks", record.id, reason)
        try:
            return BlockSet(decode_seq(seq), Position.parse(last) if last else START, packed)
        except UnreadableError as error:
            raise FencedError(f"replica {record.id} has no readable record: {error}") from None

    @with_timeout
    async def held(self, record: ReplicaRecord, fingerprints: Sequence[Fingerprint]) -> int:
        """Return how many of these fingerprints the replica's set contains."""
        packed = [pack([fingerprint]) for fingerprint in fingerprints]
        return sum(
            await self._redis.smismember(self._blocks_key(record.id, record.incarnation), packed)
        )

    @with_timeout
    async def leases_s(self) -> dict[str, float]:
        """Return the remaining seconds of each valid lease, by replica id."""
        ids = [record.id for record in await self.records()]
        pipeline = self._redis.pipeline(transaction=False)
        for replica_id in ids:
            pipeline.pttl(self._record_key(replica_id))
        pairs = zip(ids, await pipeline.execute(), strict=True)
        return {replica_id: left_ms / 1000 for replica_id, left_ms in pairs if left_ms >= 0}

    @with_timeout
    async def follow(
        self, position: Position, *, block_ms: int
    ) -> Iterator[tuple[Position, Change | None]]:
        """Return up to READ_CHANGES changes after `position`, oldest first.

        Waits up to `block_ms` for the first one. Each item is the position of a change and the
        change, or None if it is unreadable. Changes are decoded one by one while the caller
        iterates, since together they may have millions of blocks.
        """
        reply = await self._redis.xread(
            {self._changes: str(position)}, count=READ_CHANGES, block=block_ms
        )
        entries = reply[0][1] if reply else []
        return (
            (Position.parse(entry_id), self._decoded(entry_id, fields))
            for entry_id, fields in entries
        )

    # Methods with which routers find each other and exchange messages.

    @with_timeout
    async def announce_router(
        self, router_id: str, description: RouterDescription, *, lease_s: float
    ) -> None:
        """Add the router, or renew its lease."""
        await self._announce(
            keys=[self._router_key(router_id), self._router_ids],
            args=[router_id, encode(description), _milliseconds(lease_s)],
        )

    @with_timeout
    async def withdraw_router(self, router_id: str) -> None:
        await self._redis.delete(self._router_key(router_id))

    @with_timeout
    async def routers(self) -> dict[str, RouterDescription]:
        """Return the routers with a valid lease, by id; remove the ids of all others from Redis."""
        ids = await self._ids(self._router_ids, "router")
        if not ids:
            return {}
        described = await self._redis.mget([self._router_key(router_id) for router_id in ids])
        descriptions = dict[str, RouterDescription]()
        for router_id, packed in zip(ids, described, strict=True):
            try:
                if packed is not None:
                    descriptions[router_id] = decode_router(packed)
            except DECODE_ERRORS as error:
                self.unreadable.add("router", router_id, error)
        if expired := [id_ for id_, packed in zip(ids, described, strict=True) if packed is None]:
            await self._redis.srem(self._router_ids, *expired)
        return descriptions

    @with_timeout
    async def publish_to_routers(self, payload: bytes) -> None:
        """Send a message to all subscribed routers; it is not stored."""
        await self._redis.publish(self._routers, payload)

    async def router_messages(self, *, wait_s: float) -> AsyncIterator[bytes | None]:
        """Yield each message from now on, and None after every `wait_s` without a message."""
        async with self._redis.pubsub() as subscription:
            await subscription.subscribe(self._routers)
            while True:
                message = await subscription.get_message(
                    ignore_subscribe_messages=True, timeout=wait_s
                )
                yield message and message["data"]

    async def _ids(self, key: str, kind: Kind) -> list[str]:
        """Return the members of a set of ids, in order."""
        ids = []
        for member in await self._redis.smembers(key):
            try:
                ids.append(text(member))
            except UnreadableError as error:
                self.unreadable.add(kind, member, error)
        return sorted(ids)

    def _record(
        self, replica_id: str, fields: Sequence[bytes | None] | bytes
    ) -> ReplicaRecord | str | None:
        """Return a record, the reason why it is unreadable, or None if it has no lease."""
        try:
            return decode_record(self.model, replica_id, fields)
        except DECODE_ERRORS as error:
            return self.unreadable.add("replica", replica_id, error)

    def _decoded(self, entry_id: bytes, fields: Mapping[bytes, bytes]) -> Change | None:
        try:
            return decode_change(fields)
        except DECODE_ERRORS as error:
            self.unreadable.add("change", entry_id, error)
        except KeyError as missing:
            self.unreadable.add("change", entry_id, f"the field {missing} is missing")
        return None

    async def _write(
        self, script: Any, writer_state: WriterState, lease_s: float, arguments: list[Any]
    ) -> int:
        """Run a writer's script and return its result. Raises FencedError if it is fenced."""
        reply: int | bytes = await script(
            keys=self._keys(writer_state.replica_id, writer_state.incarnation),
            args=[
                writer_state.incarnation,
                writer_state.seq,
                writer_state.blocks,
                _milliseconds(lease_s),
                writer_state.replica_id,
                *arguments,
            ],
        )
        if isinstance(reply, bytes):
            raise FencedError(
                f"Redis does not have the expected {writer_state}: it has lost its data, or "
                "another writer has registered the replica"
            )
        return reply

    def _keys(self, replica_id: str, incarnation: str) -> list[str]:
        return [
            self._record_key(replica_id),
            self._blocks_key(replica_id, incarnation),
            self._replicas,
            self._changes,
        ]

    def _router_key(self, router_id: str) -> str:
        return f"{self._prefix}:router:{router_id}"

    def _record_key(self, replica_id: str) -> str:
        return f"{self._prefix}:replica:{replica_id}"

    def _blocks_key(self, replica_id: str, incarnation: str) -> str:
        return f"{self._prefix}:blocks:{replica_id}:{incarnation}"


def _stream_limits() -> tuple[int, int]:
    return STREAM_CHANGES, STREAM_MS


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _end(last_entries: list[tuple[bytes, Any]]) -> Position:
    return Position.parse(last_entries[0][0]) if last_entries else START
