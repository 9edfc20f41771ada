"""The response to one prompt as a stream of chunks.

If the replica that generates it is lost, another replica continues.
"""

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
from kvroute.router.connections.links import HungError
from kvroute.router.connections.unstarted import TakenBackError
from kvroute.router.dispatch.losses import Losses, engine_failure, lost
from kvroute.router.placement.attempts import Attempt, Outcome, Placement, RequestContext
from kvroute.router.placement.receipts import receipt
from kvroute.wire.link import FailedError, LostError, RefusedError, Stream

log = logging.getLogger("kvroute.dispatch")

LOST = (LostError, EngineDeadError, HungError)  # errors that mean that the replica is lost


@dataclass(slots=True)
class ReplicaStream:
    """One replica's stream of chunks, after its first chunk has arrived."""

    replica_id: str
    placement: Placement
    first: Chunk
    rest: Stream  # the chunks after the first one
    attempt: Attempt

    def close(self) -> None:
        """Cancel the request at the replica. A second call has no effect."""
        self.rest.cancel()
        self.attempt.end()


Start = Callable[[GenerateRequest, RequestContext, Losses], Awaitable[ReplicaStream]]


class Generation:
    """One prompt's stream of chunks. It comes from several replicas if replicas are lost.

    Args:
        start: sends the request, or its rest, to another replica.
        request: the request as it was sent to the first replica.
        call: the client's HTTP request.
        current: the stream of the first replica.
        losses: the replicas that the request has lost so far.
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
        self.replica_id = current.replica_id  # the first replica
        self.placement = current.placement  # the placement that chose the first replica
        self.sent = sent = current.attempt.context  # the context with which it was sent there
        # Prompt tokens that the first replica found in its cache.
        self.cached_tokens = current.first.cached_tokens
        # Prompt tokens that the first replica wrote to its cache.
        self._written_tokens = current.first.http.written_tokens if current.first.http else 0
        self.request_id = request.request_id  # the id under which the engine runs the request
        self.token_ids = request.token_ids
        self.scope = request.scope
        self._start = start
        self._request = request
        self._call = call
        # The context for other replicas, if the request has to be sent again.
        self._context = replace(
            context, is_resumed=True, turn=sent.turn, keep=sent.keep, evicted_why=sent.evicted_why
        )
        self._current = current
        self._first: Chunk | None = current.first  # the first chunk, until it is read
        self._losses = losses
        self._emitted: list[int] = []  # token ids generated so far, of all choices together
        self._deltas: list[int] = []  # number of tokens in each of the engine's outputs so far
        # False once the replica has said that no other replica can continue the response exactly.
        self._parts_can_continue = True
        # Unix time in the response of an attached server, and characters of its answer so far. The
        # time is 0 if the replica has used the time of the call.
        self._created, self._text_chars = 0, 0
        self._has_data = False  # True once the client may have received a part of the response

    @property
    def expected_tokens(self) -> int:
        """Return the prompt tokens that the router expected in the first replica's cache."""
        return self.placement.expected_tokens(self.replica_id)

    def receipt(self, policy: str) -> dict[str, Any]:
        """Return the receipt, for the client: why the first replica was chosen, and its cache hit.

        Args:
            policy: name of the routing policy.
        """
        wait = self.sent.wait
        return receipt(
            self.placement,
            policy=policy,
            broken=self.sent.broken,
            evicted_why=self.sent.evicted_why,
            is_batch=self.sent.is_in_lane,
        ) | {
            "request_id": self.request_id,
            "replica": self.replica_id,
            "expected_tokens": self.expected_tokens,
            "cached_tokens": self.cached_tokens,
            "queued_s": round(wait.waited_s, 3),
            "queued_for": wait.reason,
            **{f"{reason}_s": round(held_s, 3) for reason, held_s in wait.held_s.items()},
        }

    async def next(self) -> Chunk | None:
        """Return the next chunk from the replica that runs the request now; None after the last.

        Raises:
            ApiError: no replica can continue the response.
        """
        chunk, self._first = self._first, None
        chunk = chunk or await self._next_of_rest()
        if chunk is None:
            self.close()
        else:
            self._emitted.extend(chunk.token_ids)
            if chunk.http is not None:
                self._note(chunk.http)
        return chunk

    @property
    def is_refused(self) -> bool:
        """Return whether the replica's HTTP application answered with an error and no tokens."""
        return is_refused(self._current.first)

    def _note(self, part: HttpPart) -> None:
        self._deltas.extend(part.deltas)
        self._parts_can_continue &= part.can_continue
        self._created = part.created or self._created
        self._text_chars += part.text_chars
        self._has_data |= bool(part.data)

    def close(self) -> None:
        """End the request, whether it is complete or not. A second call has no effect."""
        self._current.close()

    async def _next_of_rest(self) -> Chunk | None:
        current = self._current
        try:
            chunk = await current.rest.next()
        except LOST as error:
            if current.attempt.is_complete:
                return None
            current.attempt.end("failed")  # no cancel: the replica is dead or is being killed
            record_loss(self._losses, current.attempt, error, was_taken=True)
            return await self._resume(error)
        except Exception as error:
            current.attempt.end(outcome_of(error))
            if refusal := final_error(error):
                raise refusal from error
            raise
        if chunk is not None:
            current.attempt.receive(chunk, time.monotonic())
        return chunk

    async def _resume(self, error: BaseException) -> Chunk:
        """Continue on another replica, and return the first chunk that it sends."""
        replica_id = self._current.replica_id
        log.info("replica %s was lost after it sent %d tokens", replica_id, len(self._emitted))
        if not self._can_continue():
            raise lost(
                replica_id,
                "and no other replica can continue its answer exactly (reasons are, for example, n "
                "above 1, a presence_penalty, or tools at an attached server)",
            ) from error
        self._current = await self._start(self._remaining_request(), self._context, self._losses)
        return self._current.first

    def _can_continue(self) -> bool:
        """Return whether another replica can continue the response.

        If the client has received nothing yet, the other replica can start the response again.
        """
        return self._parts_can_continue or not self._has_data

    def _remaining_request(self) -> GenerateRequest:
        """Return the request to send to another replica.

        It contains the tokens that were generated so far, or is the original request if the
        response starts again from the beginning.
        """
        if not self._parts_can_continue:
            self._emitted, self._deltas, self._parts_can_continue = [], [], True
            self._created, self._text_chars = 0, 0
            return self._request
        call = replace(
            self._call,
            deltas=tuple(self._deltas),
            cached_tokens=self.cached_tokens,
            written_tokens=self._written_tokens,
            created=self._created or self._call.created,
            text_chars=self._text_chars if self._created else -1,
        )
        return replace(self._request.after(self._emitted), call=call)


StartPrompt = Callable[[], Awaitable[Generation]]  # starts a prompt; returns at its first chunk


def is_refused(first: Chunk) -> bool:
    """Return whether a stream's first chunk is an HTTP error instead of a part of a response."""
    return first.http is not None and first.http.status >= 400 and not first.token_ids


def record_loss(losses: Losses, attempt: Attempt, error: Exception, *, was_taken: bool) -> None:
    """Record that an attempt's replica was lost.

    Args:
        was_taken: whether the replica had begun with the request.
    """
    losses.add(
        attempt.replica_id,
        died=not isinstance(error, HungError),
        is_excluded=not isinstance(error, LostError),  # a LostError may concern the connection only
        was_taken=was_taken,
        tokens=attempt.output_tokens,
        words=engine_failure(error),
    )


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of an attempt that ends with this error."""
    match error:
        case asyncio.CancelledError():
            return "cancelled"
        case TakenBackError(is_overdue=True):
            return "refused"
        case RefusedError() | TakenBackError():
            return "moved"
        case ValueError():
            return "refused"
    return "failed"


def final_error(error: BaseException) -> ApiError | None:
    """Return the error for the client; None if the request can still be sent elsewhere."""
    match error:
        case ValueError():
            return invalid(None, str(error))
        case FailedError():
            return ApiError(500, "a replica failed to answer; the reason is in its log")
    return None
