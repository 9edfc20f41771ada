"""Sends prompts to replicas, and returns the chunks of their responses."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

from msgspec.structs import replace

from kvroute.blocks.fingerprint import MediaSpan
from kvroute.contract.generation import (
    GenerateRequest,
    TokenIds,
    dispatch_id,
)
from kvroute.contract.http_call import HttpCall
from kvroute.contract.ranks import replica_of
from kvroute.router.api.errors import ApiError
from kvroute.router.api.fair_lock import FairLock
from kvroute.router.connections.links import HungError, Links
from kvroute.router.connections.unstarted import TakenBackError, Unstarted
from kvroute.router.dispatch.admission import AdmissionControl, Ticket
from kvroute.router.dispatch.blamed import REFUSED_S, PoisonList
from kvroute.router.dispatch.generation import (
    LOST,
    Generation,
    ReplicaStream,
    StartPrompt,
    final_error,
    is_refused,
    outcome_of,
    record_loss,
)
from kvroute.router.dispatch.losses import Losses
from kvroute.router.placement.attempts import Attempt, Placement, RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.queueing.holding import WAITING
from kvroute.wire.link import RefusedError, Stream

log = logging.getLogger("kvroute.dispatch")

# The most prompts that wait for their first token at the same time, not counting the first prompt
# of each call. Batch requests have a separate limit of the same size.
MAX_STARTING = 256
TRIES = 8  # replicas that may refuse a request before the router pauses and places it again
# Tokens of one call that the router buffers for a slow client. HTTP bytes count, too: `weight` in
# contract/generation.py converts them to tokens.
WAITING_TOKENS = 262_144
# Minimum buffer of one prompt, in tokens. The prompts of a call share WAITING_TOKENS; with many
# prompts, a prompt's share would be too small for a response that is not streamed, which is one
# chunk of up to 1 MB.
MIN_TOKENS = 16_384


class Dispatcher:
    """Sends each prompt to the first replica in the fleet's ranking that accepts it.

    Args:
        shared_tokens: each returns how many tokens at the start of a text all namespaces share.
        blamed: requests that crashed a replica or made it hang. The dispatcher refuses them, and
            adds new ones.
    """

    def __init__(
        self,
        links: Links,
        fleet: Fleet,
        control: AdmissionControl,
        *,
        shared_tokens: Iterable[Callable[[TokenIds], int]] = (),
        blamed: PoisonList | None = None,
    ) -> None:
        self._links = links
        self._fleet = fleet
        self.control = control
        self._shared_tokens = tuple(shared_tokens)
        self._blamed = blamed or PoisonList()
        self.unstarted = Unstarted(links.call, fleet, control.liveness.trusted)
        self._waiting = 0  # requests that pause because all replicas have refused them
        self._lock = FairLock()
        # Whether a call is a batch request -> limit of its prompts that wait for their first token.
        self._starting = {is_batch: asyncio.Semaphore(MAX_STARTING) for is_batch in (False, True)}

    def starters(
        self, prompts: Iterable[tuple[TokenIds, HttpCall]], context: RequestContext
    ) -> Iterator[StartPrompt]:
        """Yield for each prompt of a call the function that starts it: see `generate`."""
        for number, (token_ids, call) in enumerate(prompts):
            generate = self.generate_further if number else self.generate
            yield partial(generate, token_ids, call, context)

    async def generate(
        self,
        token_ids: TokenIds,
        call: HttpCall,
        context: RequestContext,
    ) -> Generation:
        """Start one prompt, and return when it has its first chunk.

        Raises:
            ApiError: see `start`.
        """
        dispatch = dispatch_id(context.request_id)
        request = GenerateRequest(
            dispatch,
            token_ids,
            context.namespace,
            variant=context.variant,
            call=call,
            shared_tokens=self.shared_tokens(token_ids, context.namespace, context.media),
        )
        losses = Losses()
        current = await self.start(request, context, losses)
        return Generation(self.start, request, call, context, current, losses)

    def shared_tokens(self, token_ids: TokenIds, namespace: str, media: Sequence[MediaSpan]) -> int:
        """Return how many tokens at the start of a prompt are shared, whatever its cache salt is.

        Images are not shared: only token ids are.

        Args:
            namespace: the cache salt. Without it, 0 is returned, since all blocks are shared.
            media: the prompt's images and the like.
        """
        if not namespace:
            return 0
        text = token_ids[: media[0].offset] if media else token_ids
        return max((shared_tokens(text) for shared_tokens in self._shared_tokens), default=0)

    async def generate_further(
        self,
        token_ids: TokenIds,
        call: HttpCall,
        context: RequestContext,
    ) -> Generation:
        """Start a prompt that is not the first one of its call.

        These prompts start one by one, so that the router can handle other calls in between. They
        have no wait limit: only a call's first prompt decides whether the call waits too long.
        """
        context = replace(context, urgency=context.urgency.without_limit())
        async with self._starting[context.urgency.is_batch]:
            await self._lock.wait()
            return await self.generate(token_ids, call, context)

    async def start(
        self, request: GenerateRequest, context: RequestContext, losses: Losses
    ) -> ReplicaStream:
        """Place the prompt, admit it and send it; repeat until a replica has sent the first chunk.

        Args:
            losses: the replicas that this request has lost. Replicas that are lost during this call
                are added.

        Raises:
            ApiError: no replica accepts the prompt in time, too many replicas die, or the engine
                refuses the prompt.
        """
        stalled = set[str]()  # replicas that the request was taken back from
        refused = set[str]()  # ranks that refused it; all others are asked before them
        ticket = Ticket(self.control, context)
        while True:
            self._blamed.check(request)
            self._check(losses, request)
            running = await ticket.running(losses.excluded_ids, stalled | refused)
            if refused.issuperset(running):
                refused.clear()
            now_s = time.monotonic()
            placement = self._fleet.place(
                request.token_ids,
                running,
                now_s,
                request.scope,
                context.media,
                is_known=not context.is_opaque,
            )
            self._fleet.observer.placed(placement, time.monotonic() - now_s)
            if not await ticket.admit(placement, request.request_id, now_s):
                continue
            try:
                admitted = ticket.with_admission(request, now_s)
                return await self._try(
                    admitted, ticket, placement, losses, stalled=stalled, refused=refused
                )
            except TakenBackError as error:
                self._fleet.observer.taken_back("deadline" if error.is_overdue else "moved")
                if error.is_overdue:
                    raise ticket.overdue(time.monotonic()) from error
            except RefusedError as error:
                await self._wait(ticket.pause_s(error, now_s, time.monotonic()))
            except LOST:
                continue

    def _check(self, losses: Losses, request: GenerateRequest) -> None:
        """Refuse a request that has lost too many replicas.

        If the request may have caused the losses, it is added to the list of blamed requests.

        Raises:
            ApiError: the request may not be sent to another replica.
        """
        try:
            losses.check()
        except ApiError as error:
            if losses.is_cause:
                self._blamed.add(request, f"earlier, {error}")
            raise

    async def _wait(self, pause_s: float) -> None:
        """Pause a request that every replica has refused.

        Raises:
            ApiError: too many requests are in such a pause.
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
        ticket: Ticket,
        placement: Placement,
        losses: Losses,
        *,
        stalled: set[str],
        refused: set[str],
    ) -> ReplicaStream:
        """Return a stream from the first replica in the ranking that accepts the request.

        Args:
            stalled: the replica is added whose engine does not start the request.
            refused: the ranks of the replicas are added that refuse the request.

        Raises:
            TakenBackError: the replica's engine does not start the request.
            RefusedError: the first TRIES replicas of the ranking refuse it; why the last one does.
            LOST: a replica was lost before it had sent its first chunk.
        """
        # Ids of replicas that refused the request. Their other data parallel ranks are skipped.
        sent_s, full, reason = time.monotonic(), set[str](), "no replica is left"
        for candidate in placement.ranking:
            replica_id = candidate.replica_id
            if len(full) == TRIES:
                break
            if full and replica_of(replica_id) in full:
                continue
            attempt = self._fleet.sent(
                placement, replica_id, request.request_id, sent_s, ticket.context
            )
            watching = partial(
                self.unstarted.watching,
                attempt=attempt,
                refused=frozenset(stalled),
                limit_s=ticket.limit_s,
            )
            try:
                return await self._send(request, placement, attempt, losses, watching)
            except RefusedError as error:
                log.info("replica %s refused a request: %s", replica_id, error)
                full.add(replica_of(replica_id))
                reason = str(error)
            except TakenBackError:
                stalled.add(replica_id)
                raise
            except LOST as error:
                log.info("replica %s was lost before it sent a token: %s", replica_id, error)
                raise
        ids = (candidate.replica_id for candidate in placement.ranking)
        refused.update(id_ for id_ in ids if replica_of(id_) in full)
        raise RefusedError(reason)

    async def _send(
        self,
        request: GenerateRequest,
        placement: Placement,
        attempt: Attempt,
        losses: Losses,
        watching: Callable[[Stream], AbstractContextManager[None]],
    ) -> ReplicaStream:
        """Send the request to the attempt's replica; return its stream after the first chunk.

        Args:
            watching: takes the request back if the engine does not start it.
        """
        expected_tokens = attempt.dispatch.prompt_tokens - attempt.dispatch.new_tokens
        request = replace(request, expected_tokens=expected_tokens, trace=attempt.trace)
        request = self._fleet.features.sending(request, attempt)
        stream = None
        try:
            if attempt.context.before_send is not None:
                await attempt.context.before_send(attempt.replica_id)
            stream = self._links.open(
                attempt.replica_id, request, max_waiting=_max_waiting(attempt.context)
            )
            with watching(stream):
                first = await stream.next()
        except BaseException as error:
            attempt.end(outcome_of(error))
            if stream is not None:
                stream.cancel()
            if isinstance(error, LOST):
                was_taken = stream is not None and stream.was_taken
                record_loss(losses, attempt, error, was_taken=was_taken)
            if isinstance(error, HungError) and stream and losses.has_stopped(stream.suspects):
                await self._blame(request, attempt.replica_id)
            if refusal := final_error(error):
                raise refusal from error
            raise
        assert first is not None, "every stream of an engine has at least one chunk"
        if is_refused(first):
            attempt.end("refused")
        else:
            attempt.receive(first, time.monotonic())
        return ReplicaStream(attempt.replica_id, placement, first, stream, attempt)

    async def _blame(self, request: GenerateRequest, replica_id: str) -> None:
        """Add a request to the list of blamed ones, because the replica that was preparing it hung.

        If the replica's machine cannot be reached, the request is not the cause.
        """
        if not await self._links.can_reach(replica_id):
            return
        log.warning(
            "request %s made replica %s hang; equal requests are refused for %g s",
            request.request_id,
            replica_id,
            REFUSED_S,
        )
        self._blamed.add(request, f"replica {replica_id} stopped while it prepared this request")


def _max_waiting(context: RequestContext) -> int:
    """Return how many tokens of one prompt's response the router buffers for a slow client."""
    return max(MIN_TOKENS, WAITING_TOKENS // context.prompts)
