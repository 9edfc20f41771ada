"""The ends of sessions in a replica: what the core calls."""

from collections.abc import Mapping, Sequence

from kvroute.features.replica_feature import Method, ReplicaFeature
from kvroute.replica.rank import Rank


class ReplicaRetention(ReplicaFeature):
    """Tells the engines which sessions have ended."""

    name = "retention"

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks

    def methods(self) -> Mapping[str, Method]:
        return {"end_session": self._end_session}

    async def _end_session(self, session: bytes, rank: int) -> bytes:
        """End a session. `session` is its number: 8 bytes, little endian.

        Raises:
            ValueError: `session` does not have 8 bytes.
        """
        if len(session) != 8:
            raise ValueError(f"a session's number has 8 bytes, not {len(session)}")
        await self._ranks[rank].engine.end_session(int.from_bytes(session, "little"))
        return b""
