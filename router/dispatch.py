"""One prompt goes to a replica, and its chunks come back; a replica that dies first is replaced."""

import logging
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from replica.protocol import Chunk, EngineDeadError, GenerateRequest, Sampling, TokenIds
from router.errors import ApiError, invalid
from router.fleet import Fleet, Placement, Trip
from router.routes import ROUTES, Route, running_replicas

log = logging.getLogger("kvroute.dispatch")

ATTEMPTS = 3  # replicas asked before the client is told that none can answer
LOST = (RayActorError, EngineDeadError)  # the replica, or its engine, is gone


@dataclass(slots=True)
class Generation:
    """A prompt being answered: its first chunk has come, the others follow."""

    replica_id: str
    expected_tokens: int  # prompt tokens the router counted on being in that replica's cache
    prompt_tokens: int
    first: Chunk
    rest: DeploymentResponseGenerator
    trip: Trip

    async def chunks(self) -> AsyncIterator[Chunk]:
        """All chunks; leaving early aborts the request. ApiError when the replica is lost."""
        try:
            yield self.first
            async for chunk in self.rest:
                yield chunk
        except LOST as error:
            raise _lost(self.replica_id) from error
        finally:
            self.close()

    def close(self) -> None:
        """The request is over, answered or not; harmless the second time."""
        self.rest.cancel()
        self.trip.end()


class Dispatcher:
    """Sends prompts where the fleet's ranking says."""

    def __init__(self, handle: DeploymentHandle, fleet: Fleet) -> None:
        self._generate = handle.options(stream=True).generate
        self._fleet = fleet

    async def begin(self, token_ids: TokenIds, sampling: Sampling, namespace: str) -> Generation:
        """Returns with the first chunk. ApiError: no replica is ready, or the engine refuses."""
        request = GenerateRequest(uuid.uuid4().hex, token_ids, sampling, namespace)
        for _ in range(ATTEMPTS):
            placement = self._fleet.place(
                token_ids, namespace, running_replicas(), time.monotonic()
            )
            if not placement.ranking:
                raise ApiError(503, "no replica is ready; try again", type="server_error")
            generation = await self._attempt(request, placement)
            if generation is not None:
                return generation
        raise _lost(placement.ranking[0].replica_id)

    async def _attempt(self, request: GenerateRequest, placement: Placement) -> Generation | None:
        """None when the replica was lost before its first chunk."""
        best = placement.ranking[0].replica_id
        route = ROUTES[request.request_id] = Route([c.replica_id for c in placement.ranking])
        stream: DeploymentResponseGenerator = self._generate.remote(request)
        trip = self._fleet.sent(placement, best, request.request_id, time.monotonic())
        try:
            first: Chunk = await anext(stream)
        except LOST as error:
            log.warning("replica %s was lost before its first token: %s", route.chosen, error)
            trip.end()
            return None
        except BaseException as error:
            trip.end()
            stream.cancel()
            if refusal := _refusal(error):
                raise refusal from error
            raise
        replica_id = route.chosen or best
        if replica_id != best:  # full, or gone: it went to a later one in the ranking
            trip.end()
            trip = self._fleet.sent(placement, replica_id, request.request_id, time.monotonic())
        trip.first_token(time.monotonic())
        return Generation(
            replica_id=replica_id,
            expected_tokens=placement.expected_tokens(replica_id),
            prompt_tokens=placement.prompt_tokens,
            first=first,
            rest=stream,
            trip=trip,
        )


def _refusal(error: BaseException) -> ApiError | None:
    """What the client can do about it; None when the fault is ours."""
    if isinstance(error, ValueError):  # the engine's; Ray wraps it in its traceback
        return invalid(None, str(getattr(error, "cause", error)))
    if isinstance(error, BackPressureError):
        return ApiError(429, "too many requests are waiting; try again later", code="overloaded")
    return None


def _lost(replica_id: str) -> ApiError:
    return ApiError(
        502, f"replica {replica_id} was lost while it answered; try again", type="server_error"
    )
