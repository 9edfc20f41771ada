"""Sends a canary to each replica, and checks that its blocks appear in Redis and in the mirror.

A canary is a tiny request. It has a namespace that is used only once, so no other request can have
the same blocks. Since it is not a client's request, routers neither log nor count it.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.generation import GenerateRequest, TokenIds
from kvroute.contract.records import ReplicaRecord
from kvroute.router.connections.links import Links, UnansweredError
from kvroute.router.placement.fleet import Fleet
from kvroute.store.connection import REDIS_ERRORS
from kvroute.store.index import Index
from kvroute.wire.structs import encode_begin

CALL_S = 15.0  # timeout in seconds for the response; it includes the engine's queue
APPEAR_S = 5.0  # timeout in seconds for the blocks to appear, after the response
CHECK_INTERVAL_S = 0.02  # seconds between two checks of the mirror
BLOCKS = 3  # full blocks in a canary's prompt
TOKEN_IDS = (100, 1000)  # range of token ids that are ordinary tokens in any vocabulary

Cause = Literal[
    "no answer",
    "caching is off",  # not an error
    "Redis is away",
    "not in the index",  # the replica runs, but is not registered
    "nothing published",
    "other fingerprints",  # the replica has published blocks, but not these
    "not in the mirror",
]


@dataclass(frozen=True, slots=True)
class Account:
    """A replica's record in Redis, and how many of the canary's blocks Redis has."""

    record: ReplicaRecord | None
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one canary."""

    expected: int  # blocks that should appear
    before: Account | None  # state of Redis before the request; None if Redis was away
    refusal: str = ""  # reason why there was no response
    answered_s: float | None = None  # seconds until the response; None: no response
    after: Account | None = None  # state of Redis at the last check
    mirror: int = 0  # blocks of the canary in the mirror
    # Seconds from the response until the mirror had all blocks; None: it did not get all.
    seen_s: float | None = None


class Canaries:
    """Sends a canary to each replica to which this router can send requests."""

    def __init__(self, index: Index, fleet: Fleet, links: Links, *, block_size: int) -> None:
        self._index, self._fleet, self._links = index, fleet, links
        self._block_size = block_size

    async def run(self) -> list[dict[str, Any]]:
        """Return a report on each replica. A failure of the replica or of Redis is part of it."""
        ids = sorted(self._links.able())
        results = await asyncio.gather(*(self._check(replica_id) for replica_id in ids))
        return list(map(report, ids, results))

    async def _check(self, replica_id: str) -> Result:
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            token_ids=self._prompt(),
            namespace=f"canary-{uuid.uuid4().hex}",
        )
        chain = self._fleet.caches.chain(request.token_ids, request.scope)
        # The blocks that the replica should publish. If its caching is off, `added` returns none.
        added = self._fleet.caches.added(replica_id, chain) or chain
        before, sent_s = await self._account(replica_id, added), time.monotonic()
        try:
            begin = encode_begin(0, request)
            await self._links.call(replica_id, "canary", begin, within_s=CALL_S)
        except UnansweredError as error:
            return Result(len(added), before, refusal=str(error))
        answered_s = time.monotonic()
        if before and before.record and before.record.facts.prefix_caching:
            await self._wait(replica_id, chain)
        seen_s, mirror = time.monotonic() - answered_s, self._mirrored(replica_id, chain)
        is_seen = mirror == len(chain)
        return Result(
            len(added),
            before,
            answered_s=answered_s - sent_s,
            after=await self._account(replica_id, added),
            mirror=len(added) if is_seen else mirror,
            seen_s=seen_s if is_seen else None,
        )

    def _prompt(self) -> TokenIds:
        """Return a prompt of full blocks plus one token, since the last token is always computed.

        It has BLOCKS blocks, or fewer if the context is short, but enough for a cache hit.
        """
        max_tokens = self._fleet.replicas.max_model_len or BLOCKS * self._block_size + 2
        # Besides full blocks, the context has to hold the prompt's last token and an output token.
        max_blocks = (max_tokens - 2) // self._block_size
        blocks = max(self._fleet.caches.least_blocks, min(BLOCKS, max_blocks))
        tokens = blocks * self._block_size + 1
        return np.random.default_rng().integers(*TOKEN_IDS, tokens, dtype=np.uint32)

    async def _wait(self, replica_id: str, chain: Sequence[Fingerprint]) -> None:
        """Wait until the mirror has all blocks, for APPEAR_S at most."""
        deadline_s = time.monotonic() + APPEAR_S
        while self._mirrored(replica_id, chain) < len(chain) and time.monotonic() < deadline_s:
            await asyncio.sleep(CHECK_INTERVAL_S)

    def _mirrored(self, replica_id: str, chain: Sequence[Fingerprint]) -> int:
        return self._fleet.caches.hits(chain).get(replica_id, 0)

    async def _account(self, replica_id: str, added: Sequence[Fingerprint]) -> Account | None:
        """Return what Redis has of a replica; None if Redis cannot be used."""
        try:
            record = await self._index.record(replica_id)
            return Account(record, await self._index.held(record, added) if record else 0)
        except REDIS_ERRORS:
            return None


def report(replica_id: str, result: Result) -> dict[str, Any]:
    """Return the result of a canary as JSON."""
    return {
        "id": replica_id,
        "answered_s": result.answered_s,
        "seen_s": result.seen_s,
        "blocks": {
            "expected": result.expected,
            "redis": result.after and result.after.blocks,
            "mirror": result.mirror,
        },
        "cause": cause_of(result),
        "detail": result.refusal,
    }


def cause_of(result: Result) -> Cause | None:
    """Return why the mirror does not have all blocks of the canary; None if it has."""
    before, after = result.before, result.after
    if result.answered_s is None:
        return "no answer"
    if result.mirror == result.expected:
        return None
    if before is None or after is None:
        return "Redis is away"
    if before.record is None or after.record is None:
        return "not in the index"
    if not after.record.facts.prefix_caching:
        return "caching is off"
    if after.blocks == result.expected:
        return "not in the mirror"
    if before.record.incarnation != after.record.incarnation:
        return "Redis is away"  # it has refused a write meanwhile, so the replica registers again
    if before.record.seq == after.record.seq:
        return "nothing published"
    return "other fingerprints"
