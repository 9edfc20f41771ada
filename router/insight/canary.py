"""Do a replica's blocks appear where routers look for them? A tiny request to each one tells.

Its blocks are in a namespace that nobody else will ever use, so whatever is found of them is the
canary's. It is no user's request: routers neither log nor count it.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from ray.serve.handle import DeploymentHandle
from redis.exceptions import RedisError

from replica.kvindex.fingerprint import Fingerprint
from replica.kvindex.index import Index, ReplicaRecord
from replica.protocol import GenerateRequest, Sampling, TokenIds
from router.routing.fleet import Fleet
from router.streams import question
from router.streams.question import UnansweredError

ASK_S = 15.0  # the longest wait for an answer: behind what the engine has queued
SEEN_S = 5.0  # ... and then for its blocks
LOOK_S = 0.02
BLOCKS = 3  # that a canary fills
TOKEN_IDS = (100, 1000)  # ordinary tokens of any vocabulary

Send = Callable[[str, GenerateRequest], Awaitable[None]]

Cause = Literal[
    "no answer",
    "caching is off",  # the one with which nothing is wrong
    "Redis is away",
    "not in the index",  # it runs, and is not registered
    "nothing published",
    "other fingerprints",  # are all that it published
    "not in the mirror",
]


@dataclass(frozen=True, slots=True)
class Account:
    """What Redis has."""

    record: ReplicaRecord | None
    blocks: int = 0  # the canary's


@dataclass(frozen=True, slots=True)
class Sighting:
    """What came of one canary."""

    expected: int  # blocks
    before: Account | None  # when it was sent; None: Redis is away
    refusal: str = ""  # why there was no answer
    answered_s: float | None = None
    after: Account | None = None  # when we looked for the last time
    mirror: int = 0  # blocks there
    seen_s: float | None = None  # after the answer, until all were in the mirror


class Canaries:
    """From one router, to all replicas that it could send a request to."""

    def __init__(
        self,
        index: Index,
        fleet: Fleet,
        send: Send,
        running: Callable[[], Sequence[str]],
        *,
        block_size: int,
    ) -> None:
        self._index = index
        self._fleet = fleet
        self._send = send
        self._running = running
        self._block_size = block_size

    async def run(self) -> list[dict[str, Any]]:
        """A report on each replica, whatever is wrong with it, or with Redis."""
        ids = sorted(self._running())
        sightings = await asyncio.gather(*(self._sight(replica_id) for replica_id in ids))
        return list(map(report, ids, sightings))

    async def _sight(self, replica_id: str) -> Sighting:
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            token_ids=self._prompt(),
            sampling=Sampling(max_tokens=1, temperature=0),
            namespace=f"canary-{uuid.uuid4().hex}",
        )
        chain = self._fleet.chain(request.token_ids, request.namespace)
        before, sent_s = await self._account(replica_id, chain), time.monotonic()
        try:
            await self._send(replica_id, request)
        except UnansweredError as error:
            return Sighting(len(chain), before, refusal=str(error))
        answered_s = time.monotonic()
        if before and before.record and before.record.facts["prefix_caching"]:
            await self._wait(replica_id, chain)
        seen_s, mirror = time.monotonic() - answered_s, self._mirrored(replica_id, chain)
        return Sighting(
            len(chain),
            before,
            answered_s=answered_s - sent_s,
            after=await self._account(replica_id, chain),
            mirror=mirror,
            seen_s=seen_s if mirror == len(chain) else None,
        )

    def _prompt(self) -> TokenIds:
        """Some full blocks, as many as have room, and the token that is always computed."""
        room = self._fleet.max_model_len or BLOCKS * self._block_size + 2  # with the answer
        blocks = max(1, min(BLOCKS, (room - 2) // self._block_size))
        tokens = blocks * self._block_size + 1
        return np.random.default_rng().integers(*TOKEN_IDS, tokens, dtype=np.uint32)

    async def _wait(self, replica_id: str, chain: Sequence[Fingerprint]) -> None:
        """Until the mirror has them all, or SEEN_S is over."""
        deadline_s = time.monotonic() + SEEN_S
        while self._mirrored(replica_id, chain) < len(chain) and time.monotonic() < deadline_s:
            await asyncio.sleep(LOOK_S)

    def _mirrored(self, replica_id: str, chain: Sequence[Fingerprint]) -> int:
        return self._fleet.mirror.hits(chain).get(replica_id, 0)

    async def _account(self, replica_id: str, chain: Sequence[Fingerprint]) -> Account | None:
        try:
            record = await self._index.record(replica_id)
            return Account(record, await self._index.held(record, chain) if record else 0)
        except (RedisError, OSError):
            return None


def sending(replicas: DeploymentHandle) -> Send:
    """To one particular replica; UnansweredError when it does not answer."""

    async def send(replica_id: str, request: GenerateRequest) -> None:
        await question.ask(replicas.canary, request, replica_id, within_s=ASK_S)

    return send


def report(replica_id: str, sighting: Sighting) -> dict[str, Any]:
    return {
        "id": replica_id,
        "answered_s": sighting.answered_s,
        "seen_s": sighting.seen_s,
        "blocks": {
            "expected": sighting.expected,
            "redis": sighting.after and sighting.after.blocks,
            "mirror": sighting.mirror,
        },
        "cause": why(sighting),
        "detail": sighting.refusal,
    }


def why(sighting: Sighting) -> Cause | None:
    """Why not all of its blocks were seen; None: they were."""
    before, after = sighting.before, sighting.after
    if sighting.answered_s is None:
        return "no answer"
    if sighting.mirror == sighting.expected:
        return None
    if before is None or after is None:
        return "Redis is away"
    if before.record is None or after.record is None:
        return "not in the index"
    if not after.record.facts["prefix_caching"]:
        return "caching is off"
    if after.blocks == sighting.expected:
        return "not in the mirror"
    if _written(before.record) == _written(after.record):
        return "nothing published"
    return "other fingerprints"


def _written(record: ReplicaRecord) -> tuple[str, int]:
    return record.incarnation, record.seq
