"""What a feature does in a replica. Each method has an empty default."""

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvroute.features.own_methods import overriding

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from kvroute.contract.generation import GenerateRequest
    from kvroute.replica.rank import Rank
    from kvroute.settings.replica import ReplicaSettings
    from kvroute.store.index import Index

Method = Callable[[bytes, int], Awaitable[bytes]]  # gets a body and the number of a rank


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaBase:
    """What a replica has when its features are built. All of it can be used at once."""

    settings: "ReplicaSettings"
    redis: "Redis"
    index: "Index"
    ranks: "Sequence[Rank]"  # the engines are started
    refusal: Callable[[], str]  # returns why the replica refuses requests now; empty: it does not


class ReplicaFeature:
    """One feature in one replica. It may import the core, and no other feature."""

    name = ""  # the name of its folder, which is the key of its data in requests

    async def start(self) -> None:
        """Prepare the engines. The replica takes requests when this has returned."""

    def tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """Return its background tasks by name. None of them ends by itself."""
        return {}

    def methods(self) -> Mapping[str, Method]:
        """Return the methods by name that routers can call."""
        return {}

    def around(
        self, request: "GenerateRequest", data: bytes
    ) -> AbstractAsyncContextManager["GenerateRequest | None"]:
        """Return a context in which the engine runs a request that has data for this feature.

        The context gives the request to run instead; None: the same one. It raises ValueError if
        the request cannot be run.
        """
        return nullcontext()

    def stays_s(self) -> float:
        """Return how long the replica stays connected, at most, when it is removed.

        The time begins when the replica gets no more requests. It ends when all routers have closed
        their connections.
        """
        return 0.0

    def report(self, rank: int) -> bytes | None:
        """Return what routers should know about a rank, for its record; None: nothing."""
        return None


class ReplicaFeatures:
    """The features of one replica, in the order of kvroute/features/__init__.py."""

    def __init__(self, features: Iterable[ReplicaFeature] = ()) -> None:
        self._all = tuple(features)
        arounds = overriding(self._all, ReplicaFeature.around)
        self._reports = overriding(self._all, ReplicaFeature.report)
        self._arounds = {each.name: each.around for each in arounds}

    async def start(self) -> None:
        """Prepare the engines."""
        await asyncio.gather(*(each.start() for each in self._all))

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the background tasks by name."""
        return {name: task for each in self._all for name, task in each.tasks().items()}

    def methods(self) -> dict[str, Method]:
        """Return the methods by name that routers can call."""
        return {name: method for each in self._all for name, method in each.methods().items()}

    def stays_s(self) -> float:
        """Return how long the replica stays connected, at most, when it is removed."""
        return max((each.stays_s() for each in self._all), default=0.0)

    def reports(self, rank: int) -> dict[str, bytes]:
        """Return what routers should know about a rank, by the name of the feature."""
        found = {each.name: each.report(rank) for each in self._reports}
        return {name: data for name, data in found.items() if data is not None}

    def around(self, request: "GenerateRequest") -> AbstractAsyncContextManager["GenerateRequest"]:
        """Return the context in which the engine runs a request. It gives the request to run.

        The features are entered in their order. Data that no feature knows is ignored.
        """
        if (call := request.call) and call.features:
            return self._entered(request, call.features)
        return nullcontext(request)

    @asynccontextmanager
    async def _entered(
        self, request: "GenerateRequest", data: Mapping[str, bytes]
    ) -> AsyncIterator["GenerateRequest"]:
        async with AsyncExitStack() as stack:
            for name, around in self._arounds.items():
                if name in data:
                    changed = await stack.enter_async_context(around(request, data[name]))
                    request = changed or request
            yield request
