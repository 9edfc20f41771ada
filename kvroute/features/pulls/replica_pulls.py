"""The pulls of one replica: what the core calls."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from kvroute.features.replica_feature import Method, ReplicaBase, ReplicaFeature
from kvroute.replica.fabric.pull import FEATURE, OFF, Exchanging, ExchangingEngine, carried
from kvroute.wire.structs import decode_begin

if TYPE_CHECKING:
    from kvroute.features.pulls.pull_options import PullOptions


class ReplicaPulls(ReplicaFeature):
    """Reports how the engines exchange blocks, and pulls blocks for hand-overs."""

    name = FEATURE

    def __init__(self, base: ReplicaBase, options: "PullOptions") -> None:
        self._ranks, self._hand_over_s = base.ranks, options.hand_over_s

    def methods(self) -> Mapping[str, Method]:
        return {"pull": self._pull}

    def report(self, rank: int) -> bytes | None:
        exchanging = self._exchanging(rank)
        return carried(exchanging)[FEATURE] if exchanging.format else None

    def stays_s(self) -> float:
        """Stay until other replicas have pulled this replica's blocks, if they can."""
        can_pull = any(self._exchanging(rank).address for rank in range(len(self._ranks)))
        return self._hand_over_s if can_pull else 0.0

    async def _pull(self, begin: bytes, rank: int) -> bytes:
        """Pull the blocks of a request's prompt without computing anything.

        Args:
            begin: The request, as `encode_begin` encodes it.
            rank: The number of the rank that pulls.

        Returns:
            An encoded PullResult.
        """
        _, request = decode_begin(begin)
        engine, result = self._ranks[rank].engine, OFF
        if isinstance(engine, ExchangingEngine):
            result = await engine.pull(replace(request, rank=rank))
        return msgspec.msgpack.encode(result)

    def _exchanging(self, rank: int) -> Exchanging:
        engine = self._ranks[rank].engine
        return engine.exchanging() if isinstance(engine, ExchangingEngine) else Exchanging()
