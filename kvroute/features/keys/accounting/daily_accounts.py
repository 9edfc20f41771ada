"""The usage of each tenant in Redis: one account per tenant and UTC day, kept for KEPT_DAYS.

    kvroute:{TAG}:accounts:2026-11-23    hash    "t" + tenant -> msgpack: quantity -> sum
                                                 "r" + router -> number of its last batch
                                                 "n" -> number of tenants

{TAG} is the same as in the index (keys.py). Routers add usage in numbered batches. A router may
send a batch twice, and it counts once: its number is in the same hash as the sums, so Redis keeps
both or loses both.
"""

import datetime
from collections.abc import Mapping
from typing import Any

import msgspec

from kvroute.contract.records import Count, Name
from kvroute.contract.unreadable import DECODE_ERRORS, UnreadableError
from kvroute.features.keys import ACCOUNT
from kvroute.features.keys.limits import OTHER
from kvroute.store.connection import ModelStore, with_timeout

KEPT_DAYS = 400  # days until an account expires
MAX_TENANTS = 1000  # maximum tenants per day with their own account; OTHER counts all later ones

# ARGV the router's id, the batch's number, the batch as msgpack, maximum tenants, the account of
# all later tenants, Unix time of the expiry in s
_ADD = r"""
local key, router = KEYS[1], 'r' .. ARGV[1]
if redis.call('TYPE', key).ok ~= 'hash' then redis.call('DEL', key) end
local last = tonumber(redis.call('HGET', key, router) or 0) or 0
if last >= tonumber(ARGV[2]) then return 0 end
-- Before all other writes: a Redis with full memory refuses a script's first write.
redis.call('HSET', key, router, ARGV[2])
local tenants = tonumber(redis.call('HGET', key, 'n') or 0) or 0
for tenant, added in pairs(cmsgpack.unpack(ARGV[3])) do
  local is_known = redis.call('HEXISTS', key, 't' .. tenant) == 1
  if not is_known and tenants >= tonumber(ARGV[4]) then tenant = ARGV[5] end
  local packed = redis.call('HGET', key, 't' .. tenant)
  if not packed and tenant ~= ARGV[5] then tenants = tenants + 1 end
  local is_ours, sums = pcall(cmsgpack.unpack, packed or '\128')
  if not is_ours or type(sums) ~= 'table' then sums = {} end
  for name, count in pairs(added) do sums[name] = (tonumber(sums[name]) or 0) + count end
  redis.call('HSET', key, 't' .. tenant, cmsgpack.pack(sums))
end
redis.call('HSET', key, 'n', tenants)
redis.call('EXPIREAT', key, ARGV[6])
return 1
"""

Account = Mapping[str, int]  # name of a quantity -> its sum
encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[Name, Count]).decode


class DailyAccounts(ModelStore):
    """The accounts of one model of one cluster.

    All methods raise RedisError or OSError if Redis is unreachable. Unreadable data in Redis does
    not make them raise an error.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._add = self._redis.register_script(_ADD)

    @with_timeout
    async def add(self, day: datetime.date, router_id: str, number: int, batch: bytes) -> None:
        """Add a batch, unless it was added already.

        Args:
            day: the UTC day.
            router_id: the router that sends the batch.
            number: number of the batch, higher than the numbers of the router's earlier batches.
            batch: tenant -> account, encoded with `encode`.
        """
        start = datetime.datetime.combine(day, datetime.time(), datetime.UTC)
        expires_at = start + datetime.timedelta(days=KEPT_DAYS + 1)
        expires_s = int(expires_at.timestamp())
        args: list[Any] = [router_id, number, batch, MAX_TENANTS, OTHER, expires_s]
        await self._add(keys=[self._key(day)], args=args)

    @with_timeout
    async def read(self, day: datetime.date) -> dict[str, Account]:
        """Return the account of each tenant; unreadable accounts are left out."""
        if await self._redis.type(self._key(day)) != b"hash":
            return {}
        accounts = {}
        for field, packed in (await self._redis.hgetall(self._key(day))).items():
            if field[:1] != b"t":
                continue
            try:
                accounts[field[1:].decode()] = _account(packed)
            except DECODE_ERRORS as error:
                self.unreadable.add(ACCOUNT, field, error)
        return accounts

    def _key(self, day: datetime.date) -> str:
        return f"{self._prefix}:accounts:{day.isoformat()}"


def _account(packed: bytes) -> Account:
    account = _decode(packed)
    if not account:
        raise UnreadableError("the account is empty")
    return account
