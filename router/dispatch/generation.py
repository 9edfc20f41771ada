"""One prompt's answer as a stream of chunks; if its replica is lost, another one continues."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from kvroute.contract.generation import Chunk, EngineDeadError, GenerateRequest
from kvroute.contract.http_call import HttpCall, HttpPart
from kvroute.router.api.errors import ApiError, invalid
from kvroute.router.connections.liveness import HungError
from kvroute.router.dispatch.losses import Losses, last_words, lost
from kvroute.router.placement.attempts import Attempt, Outcome, Placement, RequestContext
from kvroute.router.placement.receipts import receipt
from kvroute.wire.link import FailedError, LostError, RefusedError, Stream

log = logging.getLogger("kvroute.dispatch")

LOST = (LostError, EngineDeadError, HungError)  # the replica, or its engine, is dead


@dataclass(slots=True)
class ReplicaStream:
    """One replica's stream of chunks, after the first chunk has arrived."""

    replica_id: str
    placement: Placement
    first: Chunk
    rest: Stream
    attempt: Attempt

    def close(self) -> None:
        """Cancel the request at the replica. A second call has no effect."""
        self.rest.cancel()
        self.attempt.end()


Start = Callable[[GenerateRequest, RequestContext, Losses], Awaitable[ReplicaStream]]


class Generation:
    """One prompt's stream of chunks, from one replica, or from several if replicas are lost.

    Args:
        start: starts the rest of the request at another replica.
    """

    def __init__(
        self,
        start: Start,
        request: GenerateRequest,
        call: HttpCall,
        context: RequestContext,
        current: ReplicaStream,
        losses: Losses,
    ) -> None:
        self.replica_id = current.replica_id  # the first one
        self.placement = current.placement  # the placement that chose the replica
        self.wait = current.attempt.context.wait  # the request's wait before it was sent
        self.retention = current.attempt.context.retention
        self.cached_tokens = (
            current.first.cached_tokens
        )  # cached tokens that the first replica reported
        self._written_tokens = current.first.http.written_tokens if current.first.http else 0
        self.request_id = request.request_id  # id that the engine knows
        self.token_ids = request.token_ids
        self.features = context.features
        self._start = start
        self._request = request
        self._call = call
        self._context = replace(  # used if the request is sent again
            context, is_resumed=True, retention=self.retention
        )
        self._current = current
        self._first: Chunk | None = current.first  # the first chunk, until it is read
        self._losses = losses
        self._emitted: list[int] = []  # token ids so far, of all choices together
        self._deltas: list[int] = []  # tokens in each of the engine's outputs
        self._parts_can_continue = True
        self._has_data = False  # true once the client may have a part of the response

    @property
    def expected_tokens(self) -> int:
        """Return the prompt tokens that the router expected in the first replica's cache."""
        return self.placement.expected_tokens(self.replica_id)

    def receipt(self, policy: str) -> dict[str, Any]:
        """Return why the prompt was sent to its first replica, and what was cached there."""
        return receipt(
            self.placement,
            policy=policy,
            broken=self._context.broken,
            retention=self.retention,
        ) | {
            "request_id": self.request_id,
            "replica": self.replica_id,
            "expected_tokens": self.expected_tokens,
            "cached_tokens": self.cached_tokens,
            "queued_s": round(self.wait.waited_s, 3),
            "queued_for": self.wait.reason,
            "seat_s": round(self.wait.seat_s, 3),
        }

    async def next(self) -> Chunk | None:
        """Return the next chunk, from the replica that runs the request now.

        Returns:
            None after the last chunk.

        Raises:
            ApiError: no replica can continue.
        """
        chunk, self._first = self._first, None
        chunk = chunk or await self._later()
        if chunk is None:
            self.close()
        else:
            self._emitted.extend(chunk.token_ids)
            if chunk.http is not None:
                self._note(chunk.http)
        return chunk

    @property
    def is_refused(self) -> bool:
        """Return whether the replica's HTTP application has refused the call, without tokens."""
        return is_refused(self._current.first)

    def _note(self, part: HttpPart) -> None:
        self._deltas.extend(part.deltas)
        self._parts_can_continue &= part.can_continue
        self._has_data |= bool(part.data)

    def close(self) -> None:
        """End the request, complete or not. A second call has no effect."""
        self._current.close()

    async def _later(self) -> Chunk | None:
        current = self._current
        try:
            chunk = await current.rest.next()
        except LOST as error:
            if current.attempt.is_complete:
                return None
            current.attempt.end("failed")  # nothing to cancel: it is dead, or is being killed
            lose(self._losses, current.attempt, error)
            return await self._resume(error)
        except Exception as error:
            current.attempt.end(outcome_of(error))
            if refusal := refusal_of(error):
                raise refusal from error
            raise
        if chunk is not None:
            current.attempt.receive(chunk, time.monotonic())
        return chunk

    async def _resume(self, error: BaseException) -> Chunk:
        """Return the first chunk of another replica, which continues where the lost one stopped."""
        replica_id = self._current.replica_id
        log.info("replica %s was lost after %d tokens", replica_id, len(self._emitted))
        if not self._can_continue():
            raise lost(
                replica_id,
                "and no other replica can continue it exactly (because it is an attached server, "
                "or because of n above 1 or a presence_penalty, for example)",
            ) from error
        self._current = await self._start(self._rest(), self._context, self._losses)
        return self._current.first

    def _can_continue(self) -> bool:
        return self._parts_can_continue or not self._has_data

    def _rest(self) -> GenerateRequest:
        """Return the request for another replica: all of it if the client has received nothing."""
        if not self._parts_can_continue:
            self._emitted, self._deltas, self._parts_can_continue = [], [], True
            return self._request
        call = replace(
            self._call,
            deltas=tuple(self._deltas),
            cached_tokens=self.cached_tokens,
            written_tokens=self._written_tokens,
        )
        return replace(self._request.after(self._emitted), call=call)


def is_refused(first: Chunk) -> bool:
    """Return whether this is an HTTP error instead of an answer."""
    return first.http is not None and first.http.status >= 400 and not first.token_ids


def lose(losses: Losses, attempt: Attempt, error: Exception) -> None:
    """Record that the attempt's replica was lost."""
    losses.add(
        attempt.replica_id,
        died=not isinstance(error, HungError),
        is_gone=not isinstance(error, LostError),  # a dead one is never connected again
        held_s=time.monotonic() - attempt.sent_s,
        tokens=attempt.output_tokens,
        words=last_words(error),
    )


def outcome_of(error: BaseException) -> Outcome:
    """Return how an attempt ends with this error."""
    match error:
        case asyncio.CancelledError():
            return "cancelled"
        case RefusedError():
            return "moved"
        case ValueError():
            return "refused"
    return "failed"


def refusal_of(error: BaseException) -> ApiError | None:
    """Return the error for the client; None: the error is not final."""
    match error:
        case ValueError():
            return invalid(None, str(error))
        case FailedError():
            return ApiError(
                500, "a replica failed to answer; its log says why", type="server_error"
            )
    return None
