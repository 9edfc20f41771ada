"""Admission: decides when a prompt may be sent to a replica.

The gate must let a prompt in, the features with a line must let it go, and the queue must release
it. Each prompt has a Ticket. If the prompt had to wait, the caches of the
replicas have changed in the meantime. So the ticket does not admit it yet: the dispatcher places
the prompt again, and asks for admission again.
"""

import asyncio
import math
import time
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from kvroute.contract.generation import GenerateRequest
from kvroute.contract.priority import BATCH_S
from kvroute.contract.ranks import replica_of
from kvroute.router.api.errors import ApiError
from kvroute.router.connections.liveness import Liveness
from kvroute.router.placement.attempts import Placement, RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.waits import DEFAULT_URGENCY, Urgency
from kvroute.router.queueing.holding import MAX_REFUSED_S, RECOVERY_S, Admitted, Holding
from kvroute.router.queueing.refusals import no_replica
from kvroute.router.queueing.waiting_room import WaitingRoom
from kvroute.wire.link import RefusedError

POLL_S = 0.1  # seconds between two checks for a running replica, while no replica runs
# Length of the first pause of a request that all replicas have refused, before it is placed again.
# Each further pause is twice as long.
FIRST_PAUSE_S = 0.025
LONGEST_PAUSE_S = 0.5  # the longest such pause


class AdmissionControl:
    """The parts that decide when prompts for one model may be sent, in one router.

    Args:
        rooms: where prompts wait for features, in this order.
    """

    def __init__(
        self,
        fleet: Fleet,
        liveness: Liveness,
        holding: Holding,
        rooms: Sequence[WaitingRoom] = (),
    ) -> None:
        self.fleet = fleet
        self.liveness = liveness
        self.holding = holding
        self.rooms = rooms

    async def running(
        self, excluded_ids: Collection[str], urgency: Urgency = DEFAULT_URGENCY
    ) -> list[str]:
        """Return the ranks that may get a request. If there is no such rank, wait for one.

        Args:
            excluded_ids: replicas that may not get the request.

        Raises:
            ApiError: no replica was ready within RECOVERY_S or the request's own wait limit.
        """
        deadline = time.monotonic() + _recovery_s(urgency)
        while not (running := _without(self.liveness.trusted(), excluded_ids)):
            if time.monotonic() >= deadline:
                self.fleet.observer.rejected(urgency.priority, "no_replica")
                raise no_replica()
            await asyncio.sleep(POLL_S)
        return running


class Ticket:
    """One prompt's progress through the gate, the features' lines and the queue.

    Attributes:
        context: the request's context. The ticket adds the prompt's turn, what features know of
            this turn, its wait, and whether it gives way to others.
    """

    def __init__(self, control: AdmissionControl, context: RequestContext) -> None:
        self.context = context
        self._control = control
        self._rooms = (
            [] if context.is_resumed else [*control.rooms]
        )  # which the prompt has to leave
        # Reason of a feature's line -> seconds that the prompt has waited in it.
        self._waits_s = {room.line.reason: 0.0 for room in self._rooms}
        self._refused_s = (
            math.inf
        )  # time at which all replicas refused the prompt for the first time
        self._pause_s = FIRST_PAUSE_S
        # A prompt that a lost replica has begun does not wait again.
        self._admitted: Admitted | None = None
        if context.is_resumed:
            is_in_lane = context.urgency.is_batch
            order_s = context.ready_s + (BATCH_S if is_in_lane else 0.0)
            self._admitted = Admitted(order_s, is_in_lane=is_in_lane)
            self.context = replace(context, is_in_lane=is_in_lane)

    async def running(
        self, excluded_ids: Collection[str], avoided_ids: Collection[str] = ()
    ) -> Sequence[str]:
        """Return the ranks that the prompt may be sent to.

        Args:
            excluded_ids: replicas that may not get the prompt.
            avoided_ids: ranks that get the prompt only if there is no other one.

        Raises:
            ApiError: no replica was ready in time.
        """
        running = await self._control.running(excluded_ids, self.context.urgency)
        running = [id_ for id_ in running if id_ not in avoided_ids] or running
        if self._admitted is None or not self._admitted.allowed_ids:
            return running
        return [id_ for id_ in running if id_ in self._admitted.allowed_ids] or running

    async def admit(self, placement: Placement, request_id: str, now_s: float) -> bool:
        """Return whether the prompt may be sent now, according to this placement.

        Args:
            request_id: the id of the prompt's dispatch.
            now_s: time at which the prompt was placed.

        Returns:
            False if the prompt had to wait and has to be placed again.

        Raises:
            ApiError: the gate does not let the prompt in, or its wait is or would be too long.
        """
        tokens, new_tokens = placement.prompt_tokens, placement.new_tokens
        self.context.entry.admit(request_id, tokens, new_tokens, now_s)
        if self.context.turn is None:
            self.context = self._control.fleet.recognise(placement, self.context)
        return await self._leave_rooms(placement) and await self._leave_queue(placement)

    def with_admission(self, request: GenerateRequest, now_s: float) -> GenerateRequest:
        """Return the request with the values that follow from its admission.

        These are its order time for the engine's queue, its wait, and whether it gives way.

        Args:
            now_s: time at which the request was placed.
        """
        assert self._admitted is not None
        return replace(
            request,
            order_s=self._admitted.order_s - now_s,
            waited_s=max(self._admitted.missed_s, min(self._held_s, MAX_REFUSED_S)),
            is_batch=self._admitted.is_in_lane,
        )

    @property
    def _held_s(self) -> float:
        """Return the seconds that the prompt has waited in the lines of features."""
        return sum(self._waits_s.values())

    @property
    def limit_s(self) -> float:
        """Return the time at which the prompt has waited up to its limit for a replica."""
        if self.context.is_resumed:
            return math.inf
        return self.context.ready_s + self._held_s + self.context.urgency.max_wait_s

    def overdue(self, now_s: float) -> ApiError:
        """Return the error for a prompt that no engine has started within its wait limit."""
        waited_s = now_s - self.context.ready_s - self._held_s
        return self._control.holding.overdue(self.context.urgency, waited_s)

    def pause_s(self, error: RefusedError, sent_s: float, now_s: float) -> float:
        """Return how long to pause, since all replicas have refused the prompt.

        Args:
            error: the refusal of the last replica.
            sent_s: time at which the first one of these replicas was asked.
            now_s: the time.

        Raises:
            ApiError: they have refused it for RECOVERY_S, or for the request's own wait limit.
        """
        self._refused_s = min(self._refused_s, sent_s)
        limit_s = _recovery_s(self.context.urgency)
        if now_s - self._refused_s >= limit_s:
            raise ApiError(
                503,
                f"no replica has accepted this request within {limit_s:g} s ({error}); try again",
            )
        pause_s, self._pause_s = self._pause_s, min(LONGEST_PAUSE_S, 2 * self._pause_s)
        return pause_s

    async def _leave_rooms(self, placement: Placement) -> bool:
        """Wait until all features let the prompt go; return False if the prompt had to wait."""
        while self._rooms:
            room = self._rooms.pop(0)
            if waited_s := await room.leave(placement, self.context):
                self._waits_s[room.line.reason] = waited_s
                urgency = self.context.urgency.after_waiting(waited_s)
                self.context = replace(self.context, urgency=urgency)
                return False
        return True

    async def _leave_queue(self, placement: Placement) -> bool:
        """Wait in the queue if replicas are busy; return False if the prompt had to wait."""
        if self._admitted is not None:
            return True
        self._admitted = await self._control.holding.admit(placement, self.context)
        wait = self._admitted.wait
        self.context = replace(
            self.context,
            wait=wait.after_lines(self._waits_s),
            is_in_lane=self._admitted.is_in_lane,
        )
        # The queue has chosen the replica of a batch request, perhaps not the first of `placement`.
        return wait.reason == "none" and not self._admitted.allowed_ids


def _recovery_s(urgency: Urgency) -> float:
    """Return for how many seconds a request waits for a replica that accepts it."""
    if urgency.requested_wait_s is None:
        return RECOVERY_S
    return min(RECOVERY_S, urgency.requested_wait_s)


def _without(rank_ids: list[str], excluded_ids: Collection[str]) -> list[str]:
    """Return the ranks that do not belong to an excluded replica."""
    if not excluded_ids:
        return rank_ids
    return [id_ for id_ in rank_ids if replica_of(id_) not in excluded_ids]
