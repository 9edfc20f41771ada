"""One prompt goes to a replica and its chunks come back; when that dies, another one goes on."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from replica.protocol import Chunk, EngineDeadError, GenerateRequest, Sampling, TokenIds
from router.api.errors import ApiError, invalid
from router.api.request_id import dispatch_id
from router.routing.fleet import Fleet
from router.routing.trips import Asked, Outcome, Placement, Trip
from router.streams.routes import ROUTES, Route
from router.streams.watch import HungError, Watch

log = logging.getLogger("kvroute.dispatch")

LOSSES = 5  # replicas that may die under one request: it could be what kills them
RECOVERY_S = 60.0  # for a replica to come, while there is none
POLL_S = 0.1
LOST = (RayActorError, EngineDeadError, HungError)  # the replica, or its engine, is gone


@dataclass(slots=True)
class Attempt:
    """One replica answering: its first chunk has come, the others follow."""

    replica_id: str
    route: Route
    placement: Placement
    first: Chunk
    rest: DeploymentResponseGenerator
    trip: Trip

    def close(self) -> None:
        """The replica no longer works on it; harmless the second time."""
        self.rest.cancel()
        self.trip.end()


class Generation:
    """A prompt being answered in one stream of chunks, by one replica after another if need be."""

    def __init__(
        self,
        dispatcher: "Dispatcher",
        request: GenerateRequest,
        asked: Asked,
        attempt: Attempt,
        lost: list[str],
    ) -> None:
        self.replica_id = attempt.replica_id  # the first one
        self.placement = attempt.placement  # what was known when it was chosen
        self.cached_tokens = attempt.first.cached_tokens  # as it found them
        self.request_id = request.request_id  # as the engine knows it
        self.token_ids = request.token_ids
        self._dispatcher = dispatcher
        self._request = request
        self._asked = replace(asked, is_resumed=True)  # when it is sent again
        self._attempt = attempt
        self._lost = lost
        self._said: list[int] = []  # token ids; of all choices, where there are several

    @property
    def expected_tokens(self) -> int:
        """Prompt tokens that the router counted on being in the first replica's cache."""
        return self.placement.expected_tokens(self.replica_id)

    async def chunks(self) -> AsyncIterator[Chunk]:
        """All chunks; leaving early aborts the request. ApiError when nobody can go on with it."""
        chunk: Chunk | None = self._attempt.first
        try:
            while chunk is not None:
                self._said.extend(chunk.token_ids)
                yield chunk
                chunk = await self._next()
        finally:
            self.close()

    def close(self) -> None:
        """The request is over, answered or not; harmless the second time."""
        self._attempt.close()

    async def _next(self) -> Chunk | None:
        """The next chunk, whoever makes it; None after the last one."""
        attempt = self._attempt
        try:
            chunk = await self._dispatcher.watch.next(attempt.rest, attempt.route)
        except LOST as error:
            if not attempt.trip.unfinished:
                return None
            attempt.trip.end("failed")  # nothing to cancel: it is dead, or about to be ended
            self._lost.append(attempt.replica_id)
            return await self._go_on(error)
        except Exception:
            attempt.trip.end("failed")
            raise
        if chunk is not None:
            attempt.trip.hear(chunk, time.monotonic())
        return chunk

    async def _go_on(self, error: BaseException) -> Chunk:
        """The first chunk of the replica that goes on where another one was lost."""
        replica_id = self._lost[-1]
        log.info("replica %s was lost after %d tokens", replica_id, len(self._said))
        if not self._request.sampling.can_continue:
            raise _lost(
                replica_id,
                "and no other can go on exactly there: n is above 1, or presence_penalty is not 0",
            ) from error
        self._attempt = await self._dispatcher.attempt(
            self._request.after(self._said), self._asked, self._lost
        )
        return self._attempt.first


class Dispatcher:
    """Sends prompts where the fleet's ranking says."""

    def __init__(self, handle: DeploymentHandle, fleet: Fleet, watch: Watch) -> None:
        self.watch = watch
        self._generate = handle.options(stream=True).generate
        self._fleet = fleet

    async def begin(self, token_ids: TokenIds, sampling: Sampling, asked: Asked) -> Generation:
        """Returns with the first chunk. ApiError: no replica is ready, or the engine refuses."""
        dispatch = dispatch_id(asked.request_id)
        request = GenerateRequest(dispatch, token_ids, sampling, asked.namespace, lora=asked.lora)
        lost: list[str] = []
        return Generation(self, request, asked, await self.attempt(request, asked, lost), lost)

    async def attempt(self, request: GenerateRequest, asked: Asked, lost: list[str]) -> Attempt:
        """A replica's first chunk; ids of replicas that die over it join `lost`. ApiError as above,
        and when too many have."""
        while len(lost) < LOSSES:
            running = await self._running(lost)
            now_s = time.monotonic()
            placement = self._fleet.place(
                request.token_ids, request.namespace, running, now_s, request.lora
            )
            self._fleet.witness.placed(placement, time.monotonic() - now_s)
            attempt = await self._try(request, asked, placement, lost)
            if attempt is not None:
                return attempt
        raise _lost(lost[-1], f"and {LOSSES - 1} others before it")

    async def _running(self, lost: Sequence[str]) -> list[str]:
        """The replicas that may get a request; waits for one where none is left."""
        deadline = time.monotonic() + RECOVERY_S
        while not (running := [id_ for id_ in self.watch.trusted() if id_ not in lost]):
            if time.monotonic() >= deadline:
                raise ApiError(503, "no replica is ready; try again", type="server_error")
            await asyncio.sleep(POLL_S)
        return running

    async def _try(
        self, request: GenerateRequest, asked: Asked, placement: Placement, lost: list[str]
    ) -> Attempt | None:
        """None when the replica was lost before its first chunk."""
        best = placement.ranking[0].replica_id
        ranking = [candidate.replica_id for candidate in placement.ranking]
        route = ROUTES[request.request_id] = Route(ranking, lost)
        sent_s = time.monotonic()
        trip = self._fleet.sent(placement, best, request.request_id, sent_s, asked)
        stream = self._send(request, trip)
        try:
            first: Chunk | None = await self.watch.next(stream, route)
        except LOST as error:
            log.info("replica %s was lost before its first token: %s", route.chosen, error)
            trip.end("failed")
            stream.cancel()
            lost.append(route.chosen or best)
            return None
        except BaseException as error:
            refusal = _refusal(error)
            trip.end(_outcome(error, refusal))
            stream.cancel()
            if refusal:
                raise refusal from error
            raise
        assert first is not None, "an engine's stream has at least its end"
        replica_id = route.chosen or best
        if replica_id != best:  # full, or gone: it went to a later one in the ranking
            trip.end("moved")
            trip = self._fleet.sent(placement, replica_id, request.request_id, sent_s, asked)
        trip.hear(first, time.monotonic())
        return Attempt(replica_id, route, placement, first, stream, trip)

    def _send(self, request: GenerateRequest, trip: Trip) -> DeploymentResponseGenerator:
        expected_tokens = trip.dispatch.prompt_tokens - trip.dispatch.new_tokens
        request = replace(request, expected_tokens=expected_tokens, trace=trip.trace)
        try:
            return self._generate.remote(request)
        except BaseException:
            trip.end("failed")
            raise


def _outcome(error: BaseException, refusal: ApiError | None) -> Outcome:
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return "refused" if refusal else "failed"


def _refusal(error: BaseException) -> ApiError | None:
    """What the client can do about it; None when the fault is ours."""
    if isinstance(error, ValueError):  # the engine's; Ray wraps it in its traceback
        return invalid(None, str(getattr(error, "cause", error)))
    if isinstance(error, BackPressureError):
        return ApiError(429, "too many requests are waiting; try again later", code="overloaded")
    return None


def _lost(replica_id: str, more: str) -> ApiError:
    return ApiError(
        502,
        f"replica {replica_id} was lost while it answered, {more}; try again",
        type="server_error",
    )
