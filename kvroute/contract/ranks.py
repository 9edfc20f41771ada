"""Each data parallel rank of a replica has a cache of its own, and an id of its own in the index.

What the index and routers call a replica id is that of a rank. With one rank it is the replica's.
"""

from collections.abc import Iterable

SEPARATOR = "."  # Serve's ids of replicas have none


def rank_ids(replica_id: str, ranks: int) -> tuple[str, ...]:
    """The ids of all its ranks, in order."""
    if ranks == 1:
        return (replica_id,)
    return tuple(f"{replica_id}{SEPARATOR}{rank}" for rank in range(ranks))


def replica_of(rank_id: str) -> str:
    """The replica, which is one process for Serve."""
    return rank_id.partition(SEPARATOR)[0]


def split(rank_id: str) -> tuple[str, int]:
    """The replica, and which of its ranks it is."""
    replica_id, _, rank = rank_id.partition(SEPARATOR)
    return replica_id, int(rank or 0)


def replicas_of(rank_ids: Iterable[str]) -> set[str]:
    return set(map(replica_of, rank_ids))
