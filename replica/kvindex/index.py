"""Which replica holds which blocks, in Redis: the only module that knows a key or a wire byte.

All keys of one model share a hash tag, so they live on one node of a Redis Cluster:

    kvroute:{model}:replicas              set     ids registered and not yet pruned
    kvroute:{model}:replica:ID            hash    incarnation, seq, facts, load, pins; leased
    kvroute:{model}:blocks:ID:INCARNATION set     8-byte fingerprints; leased
    kvroute:{model}:router-ids            set     ids announced and not yet pruned
    kvroute:{model}:router:ID             string  what a router says of itself; with its lease
    kvroute:{model}:routers               channel what routers tell each other: routing/peers.py
    kvroute:{model}:changes               stream  r, i, s; j (joined), l (left), or c, a, d

A replica's changes are numbered from its registration (seq 0) on, and each registration is an
incarnation of its own. Every write is one script that names what it builds upon: incarnation, seq
and number of blocks. Where Redis has anything else (another writer, no lease, an older snapshot, a
set that was evicted), the write is fenced: it changes nothing, and the writer registers again.
All keys but the channel end with the last lease. Named prefixes have keys besides: prefixes.py.
"""

import asyncio
import functools
import json
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import redis.asyncio as redis

from replica.kvindex.fingerprint import Fingerprint

BATCH_BLOCKS = 5000  # the most fingerprints in one change: bounds one script's time in Redis
# Changes are kept for this long, and this many at most, roughly; a reader further behind reloads
# replicas. In bytes that is 8 for each block stored or evicted meanwhile and about 150 for each
# change: 55 MB where 100 replicas change 2,000 blocks/s each. Writers that do nothing else got 2.5
# million blocks/s into a Redis on two cores, which would be 0.6 GB.
STREAM_MS = 30_000
STREAM_CHANGES = 50_000
READ_CHANGES = 500  # the most that `follow` reads at once
READ_RECORDS = 100  # the most that `records` reads at once: some two milliseconds of a router's
ANSWER_S = 5.0  # the longest one call waits for Redis

# Of all scripts: KEYS record, blocks, replicas, changes; ARGV begins with incarnation, seq, blocks,
# lease_ms, id
_STANDING = """
local function is_fenced()
  local record = redis.call('HMGET', KEYS[1], 'incarnation', 'seq')
  return record[1] ~= ARGV[1] or record[2] ~= ARGV[2]
    or redis.call('SCARD', KEYS[2]) ~= tonumber(ARGV[3])
end
local function extend_lease()
  for _, key in ipairs(KEYS) do
    if redis.call('PTTL', key) < tonumber(ARGV[4]) then redis.call('PEXPIRE', key, ARGV[4]) end
  end
end
local function tell(...)  -- ARGV 9 the most entries, 10 for how many ms
  local entry = redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[9], '*', ...)
  local oldest = tonumber(entry:match('^%d+')) - ARGV[10]
  redis.call('XTRIM', KEYS[4], 'MINID', '~', string.format('%.0f', oldest))
end
"""

# ARGV 6 facts, 7 load, 8 replaces ('1' or ''), 9 and 10 for tell(), 11 pins
_REGISTER = f"""{_STANDING}
if ARGV[8] == '' and redis.call('EXISTS', KEYS[1]) == 1 then return 'fenced' end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'incarnation', ARGV[1], 'seq', 0, 'facts', ARGV[6], 'load', ARGV[7],
  'pins', ARGV[11])
redis.call('SADD', KEYS[3], ARGV[5])
tell('r', ARGV[5], 'i', ARGV[1], 's', 0, 'j', 1)
extend_lease()
return 0
"""

# ARGV 6 cleared ('1' or ''), 7 added, 8 removed, 9 and 10 for tell(); the answer: blocks held now
_CHANGE = f"""{_STANDING}
if is_fenced() then return 'fenced' end
local seq = redis.call('HINCRBY', KEYS[1], 'seq', 1)
local function each(command, packed)
  local batch = {{}}
  for i = 1, #packed, 8 do
    batch[#batch + 1] = packed:sub(i, i + 7)
    if #batch == 1000 then redis.call(command, KEYS[2], unpack(batch)) batch = {{}} end
  end
  if #batch > 0 then redis.call(command, KEYS[2], unpack(batch)) end
end
if ARGV[6] == '1' then redis.call('DEL', KEYS[2]) end
each('SADD', ARGV[7])
each('SREM', ARGV[8])
tell('r', ARGV[5], 'i', ARGV[1], 's', seq, 'c', ARGV[6], 'a', ARGV[7], 'd', ARGV[8])
extend_lease()
return redis.call('SCARD', KEYS[2])
"""

# ARGV 6 load, 7 pins
_RENEW = f"""{_STANDING}
if is_fenced() then return 'fenced' end
redis.call('HSET', KEYS[1], 'load', ARGV[6], 'pins', ARGV[7])
redis.call('SADD', KEYS[3], ARGV[5])
extend_lease()
return 0
"""

# ARGV incarnation, id, stream length
_LEAVE = """
redis.call('DEL', KEYS[2])
local record = redis.call('HMGET', KEYS[1], 'incarnation', 'seq')
if record[1] ~= ARGV[1] then return end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[3], ARGV[2])
redis.call('XADD', KEYS[4], 'NOMKSTREAM', 'MAXLEN', '~', ARGV[3], '*',
  'r', ARGV[2], 'i', ARGV[1], 's', record[2] + 1, 'l', 1)
"""

# ARGV incarnation; the answer: seq, packed blocks, the stream's last id or ''. One string: the
# reader shall not be the one who puts its pieces together.
_SNAPSHOT = """
local record = redis.call('HMGET', KEYS[1], 'incarnation', 'seq')
if record[1] ~= ARGV[1] then return nil end
local last = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)[1]
return {record[2], table.concat(redis.call('SMEMBERS', KEYS[2])), last and last[1] or ''}
"""

# KEYS records; the answer: the fields of each, as _record reads them. Read by a command each, they
# would cost their reader half as much again.
_READ = """
local found = {}
for i, key in ipairs(KEYS) do
  found[i] = redis.call('HMGET', key, 'incarnation', 'seq', 'facts', 'load', 'pins')
end
return found
"""


def connect(url: str) -> "redis.Redis":
    """A client for `Index`; connects at its first use. ValueError for a URL it cannot read."""
    return redis.from_url(
        url,
        protocol=2,  # one shape of answers, whatever the server speaks
        socket_connect_timeout=2,
        # `answered` below bounds every call. With this set, redis-py writes under asyncio.wait_for,
        # which before Python 3.12 loses a cancellation that meets the end of the write.
        socket_timeout=None,
    )


P = ParamSpec("P")
T = TypeVar("T")


def answered(call: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Bounds a call by ANSWER_S; TimeoutError (an OSError, as a refused connection is) beyond."""

    @functools.wraps(call)
    async def bounded(*args: P.args, **kwargs: P.kwargs) -> T:
        async with asyncio.timeout(ANSWER_S):
            return await call(*args, **kwargs)

    return bounded


def key_prefix(model: str) -> str:
    """What every key of the model begins with."""
    tag = model.replace("{", "(").replace("}", ")")
    return f"kvroute:{{{tag}}}"


class FencedError(Exception):
    """Redis does not have what the writer wrote, or has another writer's: register again."""


class Position(NamedTuple):
    """A place in the stream of changes; later ones are greater."""

    at_ms: int  # on Redis's clock
    number: int  # among the changes of that millisecond

    @classmethod
    def parse(cls, entry_id: bytes) -> "Position":
        at_ms, number = entry_id.split(b"-")
        return cls(int(at_ms), int(number))

    def __str__(self) -> str:
        return f"{self.at_ms}-{self.number}"


START = Position(0, 0)  # before any change
END = Position(2**64 - 1, 2**64 - 1)  # after any change


@dataclass(frozen=True, slots=True)
class Standing:
    """What Redis has of a replica, as its writer knows it: each write builds upon the last one."""

    replica_id: str
    incarnation: str  # new at every registration
    seq: int = 0  # changes written
    blocks: int = 0  # in the replica's set


class Warm(NamedTuple):
    """How a replica keeps a named prefix."""

    blocks: int  # all full blocks of the prefix, which were computed there
    is_pinned: bool  # they stay; otherwise some may have been evicted since, as changes tell


NO_PINS: Mapping[str, Warm] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    id: str
    incarnation: str  # new at every registration
    seq: int  # changes since the registration
    facts: Mapping[str, Any]  # what stays true while the incarnation lives
    load: Mapping[str, Any]  # running, waiting (requests), used_blocks, loras (names), lora_load_s
    pins: Mapping[str, Warm] = field(default_factory=dict)  # by Prefix.name


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of the stream."""

    replica_id: str
    incarnation: str
    seq: int
    joined: bool = False  # the replica (re)registered and holds nothing yet
    left: bool = False  # it is gone, and said so
    cleared: bool = False  # everything before `added` is forgotten
    added: tuple[Fingerprint, ...] = ()
    removed: tuple[Fingerprint, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A replica's set at one moment."""

    seq: int  # the last change in it
    position: Position  # where the stream ended: no later change is in it
    packed: bytes

    @property
    def blocks(self) -> tuple[Fingerprint, ...]:
        return unpack(self.packed)


def pack(fingerprints: Iterable[Fingerprint]) -> bytes:
    """Eight little-endian bytes for each fingerprint."""
    return np.fromiter(fingerprints, dtype="<u8").tobytes()


def unpack(packed: bytes) -> tuple[Fingerprint, ...]:
    return tuple(np.frombuffer(packed, dtype="<u8").tolist())


class Index:
    """The index of one model. Any method raises RedisError or OSError when Redis is away."""

    def __init__(self, client: "redis.Redis", model: str) -> None:
        self._redis: Any = client  # its types allow every answer of every protocol version
        self._prefix = key_prefix(model)
        self._changes = f"{self._prefix}:changes"
        self._replicas = f"{self._prefix}:replicas"
        self._routers = f"{self._prefix}:routers"
        self._router_ids = f"{self._prefix}:router-ids"
        self._register = client.register_script(_REGISTER)
        self._change = client.register_script(_CHANGE)
        self._renew = client.register_script(_RENEW)
        self._leave = client.register_script(_LEAVE)
        self._snapshot = client.register_script(_SNAPSHOT)
        self._read = client.register_script(_READ)

    # The write path: one replica's verbs.

    @answered
    async def register(
        self,
        replica_id: str,
        incarnation: str,
        *,
        replaces: bool = True,
        facts: Mapping[str, Any],
        load: Mapping[str, Any],
        pins: Mapping[str, Warm] = NO_PINS,
        lease_s: float,
    ) -> Standing:
        """The replica is known and holds nothing; a writer of an older incarnation is fenced.

        With `replaces` false it is FencedError as long as the id has a record.
        """
        standing = Standing(replica_id, incarnation)
        arguments = [json.dumps(facts), json.dumps(load), "1" if replaces else "", *_bounds()]
        arguments.append(json.dumps(dict(pins)))
        await self._write(self._register, standing, lease_s, arguments)
        return standing

    @answered
    async def change(
        self,
        standing: Standing,
        *,
        cleared: bool = False,
        added: Iterable[Fingerprint] = (),
        removed: Iterable[Fingerprint] = (),
        lease_s: float,
    ) -> Standing:
        """Set and stream change together, or FencedError and neither does."""
        arguments = ["1" if cleared else "", pack(added), pack(removed), *_bounds()]
        blocks = await self._write(self._change, standing, lease_s, arguments)
        return replace(standing, seq=standing.seq + 1, blocks=blocks)

    @answered
    async def renew(
        self,
        standing: Standing,
        *,
        load: Mapping[str, Any],
        pins: Mapping[str, Warm] = NO_PINS,
        lease_s: float,
    ) -> None:
        """The lease runs anew, and the record says how busy the replica is and what it pins."""
        await self._write(
            self._renew, standing, lease_s, [json.dumps(load), json.dumps(dict(pins))]
        )

    @answered
    async def leave(self, replica_id: str, incarnation: str) -> None:
        """Nothing of this incarnation is left, whether or not it still had its lease."""
        await self._leave(
            keys=self._keys(replica_id, incarnation),
            args=[incarnation, replica_id, STREAM_CHANGES],
        )

    # The read path: a router's verbs.

    @answered
    async def position(self) -> Position:
        """The stream's end: `follow` from here misses nothing that is written later."""
        return _end(await self._redis.xrevrange(self._changes, count=1))

    @answered
    async def records(self) -> list[ReplicaRecord]:
        """The replicas whose lease runs; the names of all others are pruned."""
        ids = sorted(member.decode() for member in await self._redis.smembers(self._replicas))
        found = dict[str, ReplicaRecord | None]()
        for begin in range(0, len(ids), READ_RECORDS):
            some = ids[begin : begin + READ_RECORDS]
            read = await self._read(keys=list(map(self._record_key, some)))
            found.update(zip(some, map(_record, some, read), strict=True))
        gone = [replica_id for replica_id, record in found.items() if record is None]
        if gone:
            await self._redis.srem(self._replicas, *gone)  # a renewal puts a living one back
        return [record for record in found.values() if record is not None]

    @answered
    async def census(self) -> tuple[list[ReplicaRecord], dict[str, int]]:
        """The living replicas, and how many blocks each one has in the index."""
        records = await self.records()
        return records, await self.counts(records)

    @answered
    async def counts(self, records: Sequence[ReplicaRecord]) -> dict[str, int]:
        """How many blocks each of these replicas has in the index."""
        pipeline = self._redis.pipeline(transaction=False)
        for record in records:
            pipeline.scard(self._blocks_key(record.id, record.incarnation))
        counts = await pipeline.execute()
        return {record.id: n for record, n in zip(records, counts, strict=True)}

    @answered
    async def record(self, replica_id: str) -> ReplicaRecord | None:
        (fields,) = await self._read(keys=[self._record_key(replica_id)])
        return _record(replica_id, fields)

    @answered
    async def blocks(self, record: ReplicaRecord) -> Snapshot:
        """A replica's set as it is, or FencedError when the record no longer is."""
        keys = self._keys(record.id, record.incarnation)
        found = await self._snapshot(keys=keys, args=[record.incarnation])
        if found is None:
            raise FencedError(f"replica {record.id} is no longer incarnation {record.incarnation}")
        seq, packed, last = found
        return Snapshot(int(seq), Position.parse(last) if last else START, packed)

    @answered
    async def held(self, record: ReplicaRecord, fingerprints: Sequence[Fingerprint]) -> int:
        """How many of these are in the replica's set."""
        packed = [pack([fingerprint]) for fingerprint in fingerprints]
        return sum(
            await self._redis.smismember(self._blocks_key(record.id, record.incarnation), packed)
        )

    @answered
    async def leases_s(self) -> dict[str, float]:
        """How long each living replica's lease still runs."""
        ids = [record.id for record in await self.records()]
        pipeline = self._redis.pipeline(transaction=False)
        for replica_id in ids:
            pipeline.pttl(self._record_key(replica_id))
        left = zip(ids, await pipeline.execute(), strict=True)
        return {replica_id: left_ms / 1000 for replica_id, left_ms in left if left_ms >= 0}

    @answered
    async def follow(
        self, position: Position, *, block_ms: int
    ) -> Iterator[tuple[Position, Change]]:
        """Up to READ_CHANGES after `position`, oldest first; waits up to block_ms for the first.

        They are decoded one by one as the caller takes them: together they may be millions of
        blocks.
        """
        answer = await self._redis.xread(
            {self._changes: str(position)}, count=READ_CHANGES, block=block_ms
        )
        entries = answer[0][1] if answer else []
        return ((Position.parse(at), _change(fields)) for at, fields in entries)

    # Routers, of each other.

    @answered
    async def announce_router(
        self, router_id: str, facts: Mapping[str, Any], *, lease_s: float
    ) -> None:
        """The router is known for so long."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.set(self._router_key(router_id), json.dumps(facts), px=_milliseconds(lease_s))
        pipeline.sadd(self._router_ids, router_id)
        pipeline.pexpire(self._router_ids, _milliseconds(lease_s))
        await pipeline.execute()

    @answered
    async def withdraw_router(self, router_id: str) -> None:
        await self._redis.delete(self._router_key(router_id))

    @answered
    async def routers(self) -> dict[str, dict[str, Any]]:
        """What those say of themselves whose lease runs, by id; the names of others are pruned."""
        ids = sorted(member.decode() for member in await self._redis.smembers(self._router_ids))
        if not ids:
            return {}
        said = await self._redis.mget([self._router_key(router_id) for router_id in ids])
        found = dict(zip(ids, said, strict=True))
        if gone := [router_id for router_id, facts in found.items() if facts is None]:
            await self._redis.srem(self._router_ids, *gone)
        return {router_id: json.loads(facts) for router_id, facts in found.items() if facts}

    @answered
    async def tell_routers(self, payload: bytes) -> None:
        """Every router that listens gets it within milliseconds; one that does not never does."""
        await self._redis.publish(self._routers, payload)

    async def told_by_routers(self, *, wait_s: float) -> AsyncIterator[bytes | None]:
        """What is told from now on; None whenever nothing was for `wait_s`."""
        async with self._redis.pubsub() as subscription:
            await subscription.subscribe(self._routers)
            while True:
                message = await subscription.get_message(
                    ignore_subscribe_messages=True, timeout=wait_s
                )
                yield message and message["data"]

    async def _write(
        self, script: Any, standing: Standing, lease_s: float, arguments: list[Any]
    ) -> int:
        """The script's answer; FencedError when it changed nothing."""
        answer: int | bytes = await script(
            keys=self._keys(standing.replica_id, standing.incarnation),
            args=[
                standing.incarnation,
                standing.seq,
                standing.blocks,
                _milliseconds(lease_s),
                standing.replica_id,
                *arguments,
            ],
        )
        if isinstance(answer, bytes):
            raise FencedError(f"Redis does not have {standing}, or has it for another writer")
        return answer

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


def _bounds() -> tuple[int, int]:
    return STREAM_CHANGES, STREAM_MS


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _end(last_entries: list[tuple[bytes, Any]]) -> Position:
    return Position.parse(last_entries[0][0]) if last_entries else START


@functools.lru_cache(maxsize=4096)
def _facts(packed: bytes) -> Mapping[str, Any]:
    """Each poll brings them again, and they are most of what a record says."""
    return MappingProxyType(json.loads(packed))


def _record(replica_id: str, fields: Sequence[bytes | None]) -> ReplicaRecord | None:
    """None where there is no lease."""
    incarnation, seq, facts, load, pins = fields
    if not (incarnation and seq and facts and load and pins):
        return None
    return ReplicaRecord(
        id=replica_id,
        incarnation=incarnation.decode(),
        seq=int(seq),
        facts=_facts(facts),
        load=json.loads(load),
        pins={name: Warm(*warm) for name, warm in json.loads(pins).items()},
    )


def _change(fields: Mapping[bytes, bytes]) -> Change:
    return Change(
        replica_id=fields[b"r"].decode(),
        incarnation=fields[b"i"].decode(),
        seq=int(fields[b"s"]),
        joined=b"j" in fields,
        left=b"l" in fields,
        cleared=fields.get(b"c") == b"1",
        added=unpack(fields.get(b"a", b"")),
        removed=unpack(fields.get(b"d", b"")),
    )
