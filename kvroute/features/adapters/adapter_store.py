"""The LoRA adapters of one model that were added while the cluster runs, as stored in Redis.

TAG is CLUSTER/MODEL, as in index.py:

    kvroute:{TAG}:adapters           hash    key of an adapter -> JSON of AddedAdapter
    kvroute:{TAG}:adapters:revision  string  a number that is new after each change
    kvroute:{TAG}:adapters:unused    set     "ROUTER KEY": this router has no more requests for an
                                             adapter that is being removed

The adapters have no lease: they stay when the cluster is started again, if Redis keeps its data.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.adapters import KIND
from kvroute.features.adapters.added import AddedAdapter, decode, encode
from kvroute.store.connection import with_timeout
from kvroute.store.revision import RevisedStore, Transaction


class NameTakenError(Exception):
    """The name belongs to another adapter, or the same adapter is still being removed."""

    def __init__(self, by: AddedAdapter) -> None:
        self.by = by


class Adapters(RevisedStore[AddedAdapter]):
    """The added adapters of one model of one cluster.

    All methods raise RedisError or OSError if Redis is unreachable. Unreadable data in Redis does
    not make them raise an error.
    """

    NAME = "adapters"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._unused = f"{self._values}:unused"
        # The values that were read last, and what they mean: most of them are read again.
        self._decoded: dict[bytes, AddedAdapter | None] = {}

    @with_timeout
    async def all(self) -> list[AddedAdapter]:
        """Return all adapters, the oldest first."""
        packed = (await self._redis.hgetall(self._values)).values()
        self._decoded = {value: self._decode(value) for value in packed}
        readable = [adapter for adapter in self._decoded.values() if adapter is not None]
        return sorted(readable, key=lambda adapter: (adapter.created_s, adapter.key))

    @with_timeout
    async def add(self, adapter: AddedAdapter, *, replaces: bool = False) -> None:
        """Add an adapter.

        Args:
            adapter: the adapter.
            replaces: whether an adapter with this name is removed once its requests have ended.

        Raises:
            NameTakenError: `replaces` is False and there is an adapter with this name, or an
                adapter with this key is being removed.
        """

        async def change(pipe: Transaction) -> None:
            replaced = []
            for other in await self._others(pipe):
                if other.key == adapter.key and (other.is_leaving or not replaces):
                    raise NameTakenError(other)
                if other.id == adapter.id and other.key != adapter.key and not other.is_leaving:
                    replaced.append(other)
            if replaced and not replaces:
                raise NameTakenError(replaced[0])
            await self._write(
                pipe, [adapter, *(replace(other, is_leaving=True) for other in replaced)]
            )

        await self._transaction(change)

    @with_timeout
    async def leave(self, key: str) -> bool:
        """Mark an adapter as being removed. Returns False if there is none with this key."""

        async def change(pipe: Transaction) -> bool:
            packed = await pipe.hget(self._values, key)
            adapter = None if packed is None else self._decode(packed)
            if adapter is None:
                return False
            if not adapter.is_leaving:
                await self._write(pipe, [replace(adapter, is_leaving=True)])
            return True

        return await self._transaction(change)

    @with_timeout
    async def is_unused(self, key: str, router: str) -> None:
        """Record that a router has no more requests for an adapter that is being removed.

        An adapter that is no longer there is ignored, so that nothing of it stays in Redis.
        """

        async def change(pipe: Transaction) -> None:
            packed = await pipe.hget(self._values, key)
            pipe.multi()
            if packed is not None:
                pipe.sadd(self._unused, _unused(router, key))

        await self._transaction(change)

    @with_timeout
    async def remove_unused(self, key: str, routers: Iterable[str]) -> bool:
        """Remove an adapter if it is being removed, and all these routers have no requests for it.

        Returns:
            Whether the adapter is no longer there.
        """
        waiting = {_unused(router, key) for router in routers}

        async def change(pipe: Transaction) -> bool:
            packed = await pipe.hget(self._values, key)
            if packed is None:
                return True
            members = {
                member.decode(errors="replace") for member in await pipe.smembers(self._unused)
            }
            adapter = self._decode(packed)
            if not waiting <= members or (adapter is not None and not adapter.is_leaving):
                return False
            mine = [member for member in members if member.endswith(f" {key}")]
            await self._begin_writes(pipe)
            pipe.hdel(self._values, key)
            if mine:
                pipe.srem(self._unused, *mine)
            return True

        return await self._transaction(change)

    async def _others(self, pipe: Transaction) -> list[AddedAdapter]:
        packed = (await pipe.hgetall(self._values)).values()
        return [adapter for value in packed if (adapter := self._decode(value)) is not None]

    async def _write(self, pipe: Transaction, adapters: Sequence[AddedAdapter]) -> None:
        await self._begin_writes(pipe)
        for adapter in adapters:
            pipe.hset(self._values, adapter.key, encode(adapter))

    def _decode(self, packed: bytes) -> AddedAdapter | None:
        """Decode a record; return None if it is unreadable."""
        if packed in self._decoded:
            return self._decoded[packed]
        try:
            return decode(packed)
        except DECODE_ERRORS as error:
            self.unreadable.add(KIND, "", error)
            return None


def _unused(router: str, key: str) -> str:
    return f"{router} {key}"
