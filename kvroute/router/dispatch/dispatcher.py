"""A prompt goes to a replica and its chunks come back; if the replica dies, another continues."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from kvroute.contract.generation import Chunk, EngineDeadError, GenerateRequest, Sampling, TokenIds
from kvroute.router.api.errors import ApiError, invalid
from kvroute.router.api.request_id import dispatch_id
from kvroute.router.api.turns import Turns
from kvroute.router.dispatch.liveness import HungError, Liveness
from kvroute.router.dispatch.losses import Losses, lost
from kvroute.router.dispatch.plans import PLANS, DispatchPlan
from kvroute.router.routing.attempts import Attempt, Outcome, Placement, RequestContext
from kvroute.router.routing.fleet import Fleet

log = logging.getLogger("kvroute.dispatch")

BEGINNING = 256  # prompts of calls with several that may wait for their first token at a time
RECOVERY_S = 60.0  # the longest wait for a replica while there is none
POLL_S = 0.1
LOST = (RayActorError, EngineDeadError, HungError)  # the replica, or its engine, is dead


@dataclass(slots=True)
class ReplicaStream:
    """One replica's stream of chunks, after the first chunk has arrived."""

    replica_id: str
    plan: DispatchPlan
    placement: Placement
    first: Chunk
    rest: DeploymentResponseGenerator
    attempt: Attempt

    def close(self) -> None:
        """Cancels the request at the replica; a second call does nothing."""
        self.rest.cancel()
        self.attempt.end()


class Generation:
    """One prompt's stream of chunks, from one replica, or from several if replicas are lost."""

    def __init__(
        self,
        dispatcher: "Dispatcher",
        request: GenerateRequest,
        context: RequestContext,
        current: ReplicaStream,
        losses: Losses,
    ) -> None:
        self.replica_id = current.replica_id  # the first one
        self.placement = current.placement  # what was known when it was chosen
        self.cached_tokens = current.first.cached_tokens  # as the first replica reported
        self.request_id = request.request_id  # as the engine knows it
        self.token_ids = request.token_ids
        self._dispatcher = dispatcher
        self._request = request
        self._context = replace(context, is_resumed=True)  # when it is sent again
        self._current = current
        self._losses = losses
        self._emitted: list[int] = []  # token ids; of all choices, where there are several

    @property
    def expected_tokens(self) -> int:
        """Prompt tokens that the router expected in the first replica's cache."""
        return self.placement.expected_tokens(self.replica_id)

    async def chunks(self) -> AsyncIterator[Chunk]:
        """All chunks; closing early aborts the request. ApiError when no replica can continue."""
        chunk: Chunk | None = self._current.first
        try:
            while chunk is not None:
                self._emitted.extend(chunk.token_ids)
                yield chunk
                chunk = await self._next()
        finally:
            self.close()

    def close(self) -> None:
        """Ends the request, complete or not; a second call does nothing."""
        self._current.close()

    async def _next(self) -> Chunk | None:
        """The next chunk, from whichever replica; None after the last one."""
        current = self._current
        try:
            chunk = await self._dispatcher.liveness.next(current.rest, current.plan)
        except LOST as error:
            if not current.attempt.unfinished:
                return None
            current.attempt.end("failed")  # nothing to cancel: it is dead, or is being killed
            _lose(self._losses, current.replica_id, current.attempt, error)
            return await self._resume(error)
        except Exception as error:
            refusal = _refusal(error)
            current.attempt.end(_outcome(error, refusal))
            if refusal:
                raise refusal from error
            raise
        if chunk is not None:
            current.attempt.receive(chunk, time.monotonic())
        return chunk

    async def _resume(self, error: BaseException) -> Chunk:
        """The first chunk of another replica, which continues where the lost one stopped."""
        replica_id = self._current.replica_id
        log.info("replica %s was lost after %d tokens", replica_id, len(self._emitted))
        if not self._request.sampling.can_continue:
            raise lost(
                replica_id,
                "and no other can go on exactly there: n is above 1, or presence_penalty is not 0",
            ) from error
        self._current = await self._dispatcher.start(
            self._request.after(self._emitted), self._context, self._losses
        )
        return self._current.first


class Dispatcher:
    """Sends each prompt to a replica in the order of the fleet's ranking."""

    def __init__(self, handle: DeploymentHandle, fleet: Fleet, liveness: Liveness) -> None:
        self.liveness = liveness
        self._generate = handle.options(stream=True).generate
        self._fleet = fleet
        self._turns = Turns()
        self._beginning = asyncio.Semaphore(BEGINNING)

    async def begin(
        self, token_ids: TokenIds, sampling: Sampling, context: RequestContext
    ) -> Generation:
        """Returns with the first chunk. ApiError: no replica is ready, or the engine refuses."""
        dispatch = dispatch_id(context.request_id)
        request = GenerateRequest(
            dispatch,
            token_ids,
            sampling,
            context.namespace,
            lora=context.lora,
            prompts=context.prompts,
        )
        losses = Losses()
        current = await self.start(request, context, losses)
        return Generation(self, request, context, current, losses)

    async def begin_in_turn(
        self, token_ids: TokenIds, sampling: Sampling, context: RequestContext
    ) -> Generation:
        """The same for a further prompt of a call. Calls with many prompts take turns, and requests
        with one prompt do not wait for them."""
        async with self._beginning:
            await self._turns.next()
            return await self.begin(token_ids, sampling, context)

    async def start(
        self, request: GenerateRequest, context: RequestContext, losses: Losses
    ) -> ReplicaStream:
        """A stream with its first chunk; replicas that die meanwhile are added to `losses`.
        ApiError as above, and when too many replicas die."""
        while True:
            losses.check()
            running = await self._running(losses.replica_ids)
            now_s = time.monotonic()
            placement = self._fleet.place(
                request.token_ids, request.namespace, running, now_s, request.lora
            )
            self._fleet.observer.placed(placement, time.monotonic() - now_s)
            current = await self._try(request, context, placement, losses)
            if current is not None:
                return current

    async def _running(self, lost: Sequence[str]) -> list[str]:
        """The replicas that may get a request; waits for one if there is none."""
        deadline = time.monotonic() + RECOVERY_S
        while not (running := [id_ for id_ in self.liveness.trusted() if id_ not in lost]):
            if time.monotonic() >= deadline:
                raise ApiError(503, "no replica is ready; try again", type="server_error")
            await asyncio.sleep(POLL_S)
        return running

    async def _try(
        self,
        request: GenerateRequest,
        context: RequestContext,
        placement: Placement,
        losses: Losses,
    ) -> ReplicaStream | None:
        """None when the replica was lost before its first chunk."""
        best = placement.ranking[0].replica_id
        ranking = [candidate.replica_id for candidate in placement.ranking]
        plan = PLANS[request.request_id] = DispatchPlan(ranking, losses.replica_ids)
        sent_s = time.monotonic()
        attempt = self._fleet.sent(placement, best, request.request_id, sent_s, context)
        stream = self._send(request, attempt)
        try:
            first: Chunk | None = await self.liveness.next(stream, plan)
        except LOST as error:
            log.info("replica %s was lost before its first token: %s", plan.chosen, error)
            attempt.end("failed")
            stream.cancel()
            _lose(losses, plan.chosen or best, attempt, error)
            return None
        except BaseException as error:
            refusal = _refusal(error)
            attempt.end(_outcome(error, refusal))
            stream.cancel()
            if refusal:
                raise refusal from error
            raise
        assert first is not None, "an engine's stream has at least its end"
        replica_id = plan.chosen or best
        if replica_id != best:  # that one was full, or gone; a later one in the ranking took it
            attempt.end("moved")
            attempt = self._fleet.sent(placement, replica_id, request.request_id, sent_s, context)
        attempt.receive(first, time.monotonic())
        return ReplicaStream(replica_id, plan, placement, first, stream, attempt)

    def _send(self, request: GenerateRequest, attempt: Attempt) -> DeploymentResponseGenerator:
        expected_tokens = attempt.dispatch.prompt_tokens - attempt.dispatch.new_tokens
        request = replace(request, expected_tokens=expected_tokens, trace=attempt.trace)
        try:
            return self._generate.remote(request)
        except BaseException:
            attempt.end("failed")
            raise


def _lose(losses: Losses, replica_id: str, attempt: Attempt, error: Exception) -> None:
    losses.add(
        replica_id,
        died=not isinstance(error, HungError),
        held_s=time.monotonic() - attempt.sent_s,
        tokens=attempt.output_tokens,
    )


def _outcome(error: BaseException, refusal: ApiError | None) -> Outcome:
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return "refused" if refusal else "failed"


def _refusal(error: BaseException) -> ApiError | None:
    """The error for the client, if the client can do something about it; else None."""
    if isinstance(error, ValueError):  # from the engine; Ray wraps it in its traceback
        return invalid(None, str(getattr(error, "cause", error)))
    if isinstance(error, BackPressureError):
        return ApiError(429, "too many requests are waiting; try again later", code="overloaded")
    return None
