"""Takes requests back that a replica's engine has not started.

An engine holds requests in its queue while running requests need its whole KV cache, or all places
in its batch. Such a request is sent to another replica as soon as one can start it. If none can
until the end of its wait limit, it is refused. A request that has begun is never taken back.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from kvroute.contract.generation import decode_ids, encode_ids
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.router.connections.links import UnansweredError
from kvroute.router.placement.attempts import Attempt
from kvroute.router.placement.fleet import Fleet
from kvroute.wire.link import Stream

log = logging.getLogger("kvroute.dispatch")

CHECK_INTERVAL_S = 0.25  # seconds between two checks of all requests without a first token
# Seconds for a replica to name the requests that wait. Its engine answers between two steps. No
# answer is no reason to take anything back.
ANSWER_S = 10.0


class TakenBackError(Exception):
    """The router has taken the request back, since the replica's engine had not started it.

    Attributes:
        is_overdue: whether it was taken back because of its wait limit.
    """

    def __init__(self, replica_id: str, *, is_overdue: bool) -> None:
        super().__init__(f"the engine of replica {replica_id} has not started the request")
        self.is_overdue = is_overdue


class Calls(Protocol):
    """Calls methods of replicas, as Links does."""

    def __call__(
        self, rank_id: str, method: str, body: bytes, *, within_s: float
    ) -> Awaitable[bytes]: ...


@dataclass(slots=True, eq=False)
class _Sent:
    """A request of this router that has no chunk yet."""

    stream: Stream
    attempt: Attempt
    refused: frozenset[str]  # replicas that it was taken back from earlier
    limit_s: float  # time at which its wait limit ends


class Unstarted:
    """This router's requests that have no chunk yet.

    Args:
        call: calls a method of a replica.
        trusted: returns the replicas that may get requests.
    """

    def __init__(
        self,
        call: Calls,
        fleet: Fleet,
        trusted: Callable[[], Sequence[str]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call = call
        self._fleet = fleet
        self._trusted = trusted
        self._clock = clock
        self._sent = dict[_Sent, None]()  # in the order in which they were sent
        self._asked = set[str]()  # replicas that have not said yet which requests wait

    @contextmanager
    def watching(
        self, stream: Stream, attempt: Attempt, refused: frozenset[str], limit_s: float
    ) -> Iterator[None]:
        """Take the request back during the block if its engine does not start it (see the module).

        Args:
            stream: the request's stream.
            attempt: the request's attempt.
            refused: replicas that the request was taken back from earlier. It is not sent to them
                again.
            limit_s: time at which the request has waited up to its limit; infinite: it has none.
        """
        sent = _Sent(stream, attempt, refused, limit_s)
        self._sent[sent] = None
        try:
            yield
        finally:
            del self._sent[sent]

    async def run(self) -> None:
        """Check all requests again and again, until cancelled.

        A replica that does not answer delays the checks of its own requests only.
        """
        async with asyncio.TaskGroup() as checks:
            while True:
                await asyncio.sleep(CHECK_INTERVAL_S)
                if self._sent:
                    checks.create_task(self.check(), name="check of unstarted requests")

    async def check(self) -> None:
        """Take back requests that can start elsewhere, or that have waited up to their limit."""
        late, free = defaultdict[str, list[_Sent]](list), self._free()
        for sent in self._sent:
            replica_id = sent.attempt.replica_id
            if replica_id not in self._asked and self._is_late(sent, free):
                late[replica_id].append(sent)
        if late:
            await asyncio.gather(*(self._check(id_, requests) for id_, requests in late.items()))

    def _free(self) -> list[str]:
        """Return the replicas whose engines have no queue."""
        loads = self._fleet.loads
        return [id_ for id_ in self._trusted() if not loads.of(id_).engine_waiting]

    def _is_late(self, sent: _Sent, free: Sequence[str]) -> bool:
        """Return whether the request may be taken back, if its engine has not started it."""
        now_s = self._clock()
        if now_s >= sent.limit_s:
            return True
        is_queued = sent.attempt.load.engine_waiting > 0  # so its engine has reported
        is_late = is_queued and self._late_s(sent, now_s) > self._fleet.loads.scale.busy_s
        return is_late and bool(self._able(sent, free, now_s))

    def _late_s(self, sent: _Sent, now_s: float) -> float:
        """Return how long ago the engine should have sent the request's first token.

        It computes the prompts before this one first, so the latest first token counts.
        """
        attempt = sent.attempt
        load, dispatch = attempt.load, attempt.dispatch
        since_s = max(attempt.sent_s, load.last_first_token_s)
        return now_s - since_s - load.speed.slowness * dispatch.prefill_s

    async def _check(self, replica_id: str, requests: Sequence[_Sent]) -> None:
        """Take back those of a replica's requests that wait in its engine."""
        ids = encode_ids([sent.attempt.request_id for sent in requests])
        try:
            self._asked.add(replica_id)
            packed = await self._call(replica_id, "unstarted", ids, within_s=ANSWER_S)
            waiting = {*decode_ids(packed)}
        except (UnansweredError, *DECODE_ERRORS) as error:
            log.info("replica %s did not say which requests wait: %s", replica_id, error)
            return
        finally:
            self._asked.discard(replica_id)
        free = self._free()  # each gets one request at most, since this changes its load
        for sent in requests:
            if sent.attempt.request_id not in waiting or sent not in self._sent:
                continue
            now_s = self._clock()
            if able := self._able(sent, free, now_s):
                free.remove(able[0])
            if able or now_s >= sent.limit_s:
                self._take_back(sent, now_s, is_overdue=not able)

    def _able(self, sent: _Sent, free: Sequence[str], now_s: float) -> list[str]:
        """Return those of the free replicas that can start the request now.

        A replica can if the prompt fits into its cache, and if it computes the prompt sooner than
        in the time by which the request is late.
        """
        loads, dispatch = self._fleet.loads, sent.attempt.dispatch
        if dispatch.variant:
            free = self._fleet.usable(dispatch.variant, free)
        late_s, able = self._late_s(sent, now_s), list[str]()
        for id_ in free:
            load = loads.of(id_)
            if (
                id_ != sent.attempt.replica_id
                and id_ not in sent.refused
                and max(load.held_tokens, load.kv.tokens) + dispatch.prompt_tokens
                <= (load.capacity_tokens or math.inf)
                and load.backlog_s(load.speed.slowness, now_s)
                + load.computing_s(0, dispatch.prompt_tokens)
                < late_s
            ):
                able.append(id_)
        return able

    def _take_back(self, sent: _Sent, now_s: float, *, is_overdue: bool) -> None:
        replica_id = sent.attempt.replica_id
        if not sent.stream.withdraw(TakenBackError(replica_id, is_overdue=is_overdue)):
            return
        log.info(
            "request %s waited %.3g s in the engine of replica %s; %s",
            sent.attempt.request_id,
            now_s - sent.attempt.sent_s,
            replica_id,
            "its wait limit is over" if is_overdue else "another replica can start it",
        )
