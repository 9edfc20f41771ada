"""What only a replica had that has left, and will probably be asked for, is computed elsewhere.

A router knows the latest prompts of the conversations that it has sent itself. It computes them
again, one at a time and the likeliest first, for as long as replicas have nothing else to compute.
Nobody waits for these requests, so only load counts them.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

from kvroute.blocks.chain import Scope
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.generation import GenerateRequest, TokenIds
from kvroute.contract.keep import Keep, SessionTurn
from kvroute.contract.ranks import replica_of
from kvroute.router.connections.links import UnansweredError
from kvroute.router.dispatch.ahead import LEAST_S, gain_s, slice_end
from kvroute.router.placement.attempts import Placement, RequestObserver
from kvroute.router.placement.fleet import Fleet
from kvroute.router.queueing.queue import BATCH_S
from kvroute.router.sessions.recent_prompts import RecentPrompt, RecentPrompts

log = logging.getLogger("kvroute.handover")

CHECK_S = 0.1  # between two looks at who runs, and whether there is time
MOST_PROMPTS = 2048  # of the replicas that have left at once: the latest ones
LOOK = 8  # prompts that are looked at until one's replica is idle
LEAST_TIME_S = 10.0  # after a replica has left ...
MOST_TIME_S = 120.0  # ... in which its prompts are computed

# Of a prompt. held: another replica has it. dropped: it has come back or ended, is not worth it, or
# the time was over. failed: its replica did not answer.
Outcome = Literal["computed", "held", "dropped", "failed"]
Send = Callable[[str, GenerateRequest], Awaitable[None]]  # raises UnansweredError


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt, and where it is to be computed."""

    end: Fingerprint
    prompt: RecentPrompt
    placement: Placement
    keep: Keep

    @property
    def replica_id(self) -> str:
        return self.placement.ranking[0].replica_id


class HandOver:
    """One router's, for one model.

    send: runs a request that no client has sent. running: the replicas that Serve runs. trusted:
    the ranks that take requests. is_free: no request waits for a replica. drain_s: for which a
    replica finishes its own requests. observer: hears of load.
    """

    def __init__(
        self,
        fleet: Fleet,
        prompts: RecentPrompts,
        send: Send,
        *,
        running: Callable[[], Collection[str]],
        trusted: Callable[[], list[str]],
        is_free: Callable[[], bool],
        drain_s: float,
        observer: RequestObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.prompts = prompts
        self.outcomes: dict[Outcome, int] = dict.fromkeys(get_args(Outcome), 0)
        self.tokens = 0  # computed
        self._fleet = fleet
        self._send = send
        self._running = running
        self._trusted = trusted
        self._is_free = is_free
        self._time_s = min(MOST_TIME_S, max(LEAST_TIME_S, drain_s))
        self._observer = observer
        self._clock = clock
        self._seen: set[str] = set()  # replicas that ran
        self._gone: set[str] = set()  # replicas that left lately
        self._waiting: list[Fingerprint] = []  # ends of turns, the likeliest last
        self._begun: set[Fingerprint] = set()  # of these, the ones with a slice
        self._until_s = 0.0

    def remember(self, turn: SessionTurn, token_ids: TokenIds, scope: Scope) -> None:
        """A prompt has its first token. Its replica may be draining."""
        self.prompts.see(turn, token_ids, scope)
        if self._gone and self._was_on(turn.end, self._gone):
            self._waiting.append(turn.end)

    async def run(self) -> None:
        """Hands over whatever replicas leave behind, until cancelled."""
        while True:
            self.watch()
            if not await self.step():
                await asyncio.sleep(CHECK_S)

    def watch(self) -> None:
        """Notes what the replicas that have left since the last call leave behind."""
        running, now_s = set(self._running()), self._clock()
        if not running:
            return  # none is there to compute it
        gone, self._seen = self._seen - running, running
        self._gone = gone | (self._gone - running if now_s < self._until_s else set())
        if gone:
            self._until_s = now_s + self._time_s
            self._waiting = self._in_order({*self._waiting, *self._left_by(gone)})

    async def step(self) -> bool:
        """Computes one prompt, if there is one and time for it. False: there is none now."""
        if self._waiting and self._clock() >= self._until_s:
            self.outcomes["dropped"] += len(self._waiting)
            self._waiting.clear()
            self._begun.clear()
        for end in self._waiting[: -LOOK - 1 : -1]:
            await asyncio.sleep(0)  # other requests come first
            if not self._has_room():
                return False
            outcome = await self._hand_over(end)
            self._waiting = [each for each in self._waiting if each != end]
            if outcome:
                self.outcomes[outcome] += 1
                self._begun.discard(end)
                return True
            self._waiting.insert(0, end)  # all others come first
        return False

    def _left_by(self, gone: Collection[str]) -> list[Fingerprint]:
        """The ends of the turns that these replicas had."""
        left = (end for end in self.prompts.ends() if self._was_on(end, gone))
        return [*islice(left, MOST_PROMPTS)]

    def _was_on(self, end: Fingerprint, replicas: Collection[str]) -> bool:
        return replica_of(self._fleet.returns.sent_to(end)) in replicas

    def _in_order(self, ends: Collection[Fingerprint]) -> list[Fingerprint]:
        now_s, returns = self._clock(), self._fleet.returns
        turns = {end: turn for end in ends if (turn := returns.awaited(end, now_s))}
        return sorted(turns, key=lambda end: turns[end].hazard)

    def _has_room(self) -> bool:
        """Nobody waits, and what replicas have is known."""
        return self._is_free() and self._fleet.mirror.is_fed and bool(self._trusted())

    async def _hand_over(self, end: Fingerprint) -> Outcome | None:
        """None: the replica where it belongs is busy."""
        try:
            job = self._job(end)
            return await self._compute(job) if isinstance(job, Job) else job
        except Exception:  # one prompt is not worth the task
            log.exception("a prompt of a replica that has left is not computed elsewhere")
            return "failed"

    def _job(self, end: Fingerprint) -> Job | Outcome | None:
        """What is to be done for the turn with that end now; None: nothing yet."""
        now_s, prompt = self._clock(), self.prompts.get(end)
        turn = self._fleet.returns.awaited(end, now_s)
        if prompt is None or turn is None:
            self.prompts.drop(end)  # it has come back to another router, or is over
            return "dropped"
        placement = self._fleet.place(prompt.token_ids, self._trusted(), now_s, prompt.scope)
        best = placement.ranking[0]
        if best.own_s < LEAST_S:
            self._moved(end, placement)
            return "computed" if end in self._begun else "held"
        if best.lora_s or gain_s(placement, turn.share) < LEAST_S or not self._caches(placement):
            return "dropped"
        return None if best.backlog_s else Job(end, prompt, placement, turn.keep)

    def _moved(self, end: Fingerprint, placement: Placement) -> None:
        holder = max(placement.ranking, key=lambda candidate: candidate.hit_blocks)
        self._fleet.returns.moved(end, holder.replica_id)

    def _caches(self, placement: Placement) -> bool:
        best = placement.ranking[0]
        return bool(self._fleet.caches.added(best.replica_id, placement.chain, best.hit_blocks))

    async def _compute(self, job: Job) -> Outcome | None:
        """Slice by slice. None: not yet all of it, as others need its replica; what is left of the
        slices then is to be seen in the index."""
        blocks, done = len(job.placement.chain), job.placement.ranking[0].hit_blocks
        while done < blocks:
            if not self._is_time_for(job):
                return None
            part = range(done, self._slice_end(job, done))
            try:
                await self._compute_part(job, part)
            except UnansweredError as error:
                log.info("replica %s has not computed a prompt: %s", job.replica_id, error)
                return "failed"
            done = part.stop
            self._begun.add(job.end)
            self.watch()
        self._fleet.returns.moved(job.end, job.replica_id)
        return "computed"

    def _is_time_for(self, job: Job) -> bool:
        """Its replica is idle, and its turn has not come back."""
        now_s = self._clock()
        if now_s >= self._until_s or self._fleet.returns.awaited(job.end, now_s) is None:
            return False
        if job.replica_id not in self._trusted() or not self._has_room():
            return False
        return not self._fleet.loads.backlogs_s([job.replica_id], now_s)[0]

    def _slice_end(self, job: Job, done: int) -> int:
        """It ends where a later request can begin, as the engine's cache groups allow."""
        size, blocks = job.placement.block_size, len(job.placement.chain)

        def prefill_s(end: int) -> float:
            return self._fleet.loads.prefill_s(job.replica_id, end * size, done * size)

        ends = range(slice_end(done, blocks, prefill_s), blocks)
        usable = (self._fleet.caches.reusable(end * size + 1) for end in ends)
        return next((each for each in usable if each > done), blocks)

    async def _compute_part(self, job: Job, part: range) -> None:
        """These blocks of the prompt are in the replica's cache. UnansweredError."""
        request, began_s = self._request(job, part), self._clock()
        attempt = self._fleet.ahead(
            job.placement, job.replica_id, part, request.request_id, began_s
        )
        attempt.observer = self._observer
        self._observer.sent(attempt)
        try:
            await self._send(job.replica_id, request)
        except BaseException:
            attempt.end("failed")
            raise
        attempt.first_token(self._clock())
        attempt.end("ok")
        self.tokens += attempt.dispatch.new_tokens
        if self._fleet.loads.unanswered(job.replica_id):  # it decodes: that gets as much time
            await asyncio.sleep(self._clock() - began_s)

    def _request(self, job: Job, part: range) -> GenerateRequest:
        """With one more token, all of the blocks can come from the cache. Requests of clients come
        first in the engine, too."""
        scope, size = job.prompt.scope, job.placement.block_size
        return GenerateRequest(
            f"handover-{secrets.token_hex(8)}",
            job.prompt.token_ids[: part.stop * size + 1],
            scope.namespace,
            lora=scope.lora,
            expected_tokens=part.start * size,
            shared_tokens=scope.shared_tokens,
            order_s=BATCH_S,
            keep=job.keep,
        )
