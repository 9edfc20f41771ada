"""Ids of data parallel ranks: each rank of a replica has its own cache and its own id in the index.

The index and routers treat each rank as a replica, whose id is the rank's id. If a replica has only
one rank, the rank has the replica's id.
"""

from collections.abc import Iterable

SEPARATOR = "."  # between the replica's id, which has no such character, and the rank's number


def rank_ids(replica_id: str, ranks: int) -> tuple[str, ...]:
    """Return the ids of all ranks of a replica, in order."""
    if ranks == 1:
        return (replica_id,)
    return tuple(f"{replica_id}{SEPARATOR}{rank}" for rank in range(ranks))


def replica_of(rank_id: str) -> str:
    """Return the id of the rank's replica, as Ray Serve knows it."""
    return rank_id.partition(SEPARATOR)[0]


def split(rank_id: str) -> tuple[str, int]:
    """Return the id of the rank's replica, and the rank's number."""
    replica_id, _, rank = rank_id.partition(SEPARATOR)
    return replica_id, int(rank or 0)


def replicas_of(rank_ids: Iterable[str]) -> set[str]:
    return set(map(replica_of, rank_ids))
