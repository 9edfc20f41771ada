"""Dispatch: sends prompts to replicas and returns the chunks of their responses."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from kvroute.blocks.fingerprint import Feature
from kvroute.contract.generation import GenerateRequest, TokenIds, dispatch_id
from kvroute.contract.http_call import HttpCall
from kvroute.contract.ranks import replica_of
from kvroute.router.api.errors import ApiError
from kvroute.router.api.fair_lock import FairLock
from kvroute.router.connections.links import Links
from kvroute.router.connections.liveness import HungError
from kvroute.router.dispatch.admission import Gate, Ticket
from kvroute.router.dispatch.blamed import PoisonList
from kvroute.router.dispatch.generation import (
    LOST,
    Generation,
    ReplicaStream,
    is_refused,
    lose,
    outcome_of,
    refusal_of,
)
from kvroute.router.dispatch.losses import Losses
from kvroute.router.placement.attempts import Attempt, Placement, RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.queueing.holding import WAITING
from kvroute.wire.link import RefusedError

log = logging.getLogger("kvroute.dispatch")

# Most prompts that may wait for their first token at a time, among calls with several prompts.
BEGINNING = 256
TRIES = 8  # replicas that may refuse a request before it pauses and is placed again
FIRST_PAUSE_S = 0.025  # seconds of the first such pause; each further pause is twice as long
LONGEST_PAUSE_S = 0.5  # the longest such pause in seconds
WAITING_TOKENS = 262_144  # tokens (and bytes) of one call that may wait for a slow client
# Each prompt of a call may have so many of these tokens at least: a response that is not streamed
# is one chunk of up to 1 MB.
MIN_TOKENS = 16_384


class Dispatcher:
    """Sends each prompt to a replica in the order of the fleet's ranking.

    Args:
        shared_tokens: returns how many tokens at the start of a text belong to a shared prefix.
    """

    def __init__(
        self,
        links: Links,
        fleet: Fleet,
        gate: Gate,
        *,
        shared_tokens: Callable[[TokenIds], int] = lambda token_ids: 0,
        blamed: PoisonList | None = None,
    ) -> None:
        self._links = links
        self._fleet = fleet
        self.gate = gate
        self._shared_tokens = shared_tokens
        self._blamed = blamed or PoisonList()
        self._waiting = 0  # requests that wait for a replica with room
        self._lock = FairLock()
        self._beginning = {is_batch: asyncio.Semaphore(BEGINNING) for is_batch in (False, True)}

    async def begin_all(
        self, prompts: Sequence[tuple[TokenIds, HttpCall]], context: RequestContext
    ) -> list[Generation]:
        """Start all prompts of a call, or none of them; return when each has its first chunk.

        Raises:
            ApiError: one of them cannot run.
            OverLimitError: one of them would exceed a limit of its tenant.
        """
        if len(prompts) == 1:
            return [await self.begin(*prompts[0], context)]
        tasks: list[asyncio.Task[Generation]] = []
        try:
            for prompt, call in prompts:
                begin = self.begin_in_turn if tasks else self.begin
                tasks.append(asyncio.create_task(begin(prompt, call, context)))
            return await asyncio.gather(*tasks)
        except BaseException:  # one cannot run, or the client has disconnected
            for task in tasks:
                task.cancel()
            for begun in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(begun, Generation):
                    begun.close()
            raise

    async def begin(
        self,
        token_ids: TokenIds,
        call: HttpCall,
        context: RequestContext,
    ) -> Generation:
        """Start one prompt, and return when it has its first chunk.

        Raises the same errors as `start`.
        """
        dispatch = dispatch_id(context.request_id)
        request = GenerateRequest(
            dispatch,
            token_ids,
            context.namespace,
            lora=context.lora,
            call=call,
            shared_tokens=self.shared_tokens(token_ids, context.namespace, context.features),
        )
        losses = Losses()
        current = await self.start(request, context, losses)
        return Generation(self.start, request, call, context, current, losses)

    def shared_tokens(
        self, token_ids: TokenIds, namespace: str, features: Sequence[Feature]
    ) -> int:
        """Return how many tokens at the start of a prompt all namespaces share.

        Images are not shared: a shared prefix consists of token ids.
        """
        text = token_ids[: features[0].offset] if features else token_ids
        return self._shared_tokens(text) if namespace else 0

    async def begin_in_turn(
        self,
        token_ids: TokenIds,
        call: HttpCall,
        context: RequestContext,
    ) -> Generation:
        """Start a further prompt of a call with several prompts.

        Calls with several prompts take turns, so that calls with one prompt do not wait for them.
        The further prompts have no wait limit: the first prompt decides whether the call waits too
        long.
        """
        context = replace(context, urgency=context.urgency.without_limit())
        async with self._beginning[context.urgency.is_batch]:
            await self._lock.wait()
            return await self.begin(token_ids, call, context)

    async def start(
        self, request: GenerateRequest, context: RequestContext, losses: Losses
    ) -> ReplicaStream:
        """Place the prompt, admit it and send it; repeat until a replica has sent the first chunk.

        Args:
            losses: replicas that are lost meanwhile are added to it.

        Raises:
            ApiError: no replica is ready, too many die, or the engine refuses.
            OverLimitError: the prompt would exceed a limit of its tenant.
        """
        ticket, pause_s = Ticket(self.gate, context), FIRST_PAUSE_S
        while True:
            self._blamed.check(request)
            self._check(losses, request)
            running = await ticket.running(losses.gone)
            now_s = time.monotonic()
            placement = self._fleet.place(
                request.token_ids, running, now_s, request.scope, context.features
            )
            self._fleet.observer.placed(placement, time.monotonic() - now_s)
            if not await ticket.admit(placement, request.request_id, now_s):
                continue
            try:
                signed = ticket.signed(request, now_s)
                return await self._try(signed, ticket.context, placement, losses)
            except RefusedError:
                await self._wait(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            except LOST:
                continue

    def _check(self, losses: Losses, request: GenerateRequest) -> None:
        """Refuse a request that has lost too many replicas.

        If the request may be why they died, also put it on the poison list.

        Raises:
            ApiError: no other replica may get it.
        """
        try:
            losses.check()
        except ApiError as error:
            if losses.is_cause:
                self._blamed.add(request, f"earlier, {error}")
            raise

    async def _wait(self, pause_s: float) -> None:
        """Wait for a replica with room.

        Raises:
            ApiError: too many requests wait.
        """
        if self._waiting >= WAITING:
            raise ApiError(429, "too many requests are waiting; try again later", code="overloaded")
        self._waiting += 1
        try:
            await asyncio.sleep(pause_s)
        finally:
            self._waiting -= 1

    async def _try(
        self,
        request: GenerateRequest,
        context: RequestContext,
        placement: Placement,
        losses: Losses,
    ) -> ReplicaStream:
        """Return a stream from the first replica in the ranking that has room.

        Raises:
            RefusedError: none of the best replicas has room.
            LOST: a replica was lost before its first chunk.
        """
        sent_s, full = time.monotonic(), set[str]()  # by replica: its ranks share their room
        for candidate in placement.ranking:
            replica_id = candidate.replica_id
            if len(full) == TRIES:
                break
            if full and replica_of(replica_id) in full:
                continue
            attempt = self._fleet.sent(placement, replica_id, request.request_id, sent_s, context)
            try:
                return await self._begin(request, placement, attempt, losses)
            except RefusedError as error:
                log.info("replica %s refused a request: %s", replica_id, error)
                full.add(replica_of(replica_id))
            except LOST as error:
                log.info("replica %s was lost before its first token: %s", replica_id, error)
                lose(losses, attempt, error)
                raise
        raise RefusedError("no replica has room for the request")

    async def _begin(
        self, request: GenerateRequest, placement: Placement, attempt: Attempt, losses: Losses
    ) -> ReplicaStream:
        """Send the request to the attempt's replica; return its stream after the first chunk."""
        expected_tokens = attempt.dispatch.prompt_tokens - attempt.dispatch.new_tokens
        request = replace(request, expected_tokens=expected_tokens, trace=attempt.trace)
        stream = None
        try:
            stream = self._links.open(
                attempt.replica_id, request, most_waiting=_most_waiting(attempt.context)
            )
            first = await stream.next()
        except BaseException as error:
            attempt.end(outcome_of(error))
            if stream is not None:
                stream.cancel()
                if isinstance(error, HungError) and losses.has_stopped(stream.stopped_among):
                    self._blame(request, attempt.replica_id)
            if refusal := refusal_of(error):
                raise refusal from error
            raise
        assert first is not None, "an engine's stream has at least its end"
        if is_refused(first):
            attempt.end("refused")
        else:
            attempt.receive(first, time.monotonic())
        return ReplicaStream(attempt.replica_id, placement, first, stream, attempt)

    def _blame(self, request: GenerateRequest, replica_id: str) -> None:
        """Add the request to the poison list: the replica stopped while its loop prepared it."""
        log.warning(
            "request %s stopped replica %s; it is refused for some minutes",
            request.request_id,
            replica_id,
        )
        self._blamed.add(request, f"replica {replica_id} stopped while it prepared this request")


def _most_waiting(context: RequestContext) -> int:
    """Return the most tokens of one prompt's response that may wait for a slow client."""
    return max(MIN_TOKENS, WAITING_TOKENS // context.prompts)
