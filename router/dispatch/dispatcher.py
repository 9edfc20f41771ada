"""A prompt goes to a replica and its chunks come back; if the replica dies, another continues."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kvroute.blocks.fingerprint import Feature
from kvroute.contract.generation import (
    Chunk,
    EngineDeadError,
    GenerateRequest,
    TokenIds,
    dispatch_id,
)
from kvroute.contract.http_call import HttpCall, HttpPart
from kvroute.contract.ranks import replica_of, replicas_of
from kvroute.router.admission.waits import AT_EASE, Urgency
from kvroute.router.api.errors import ApiError, invalid
from kvroute.router.api.turns import Turns
from kvroute.router.connections.links import LateError, Links, UnansweredError
from kvroute.router.connections.liveness import HungError, Liveness
from kvroute.router.dispatch.blamed import Blamed
from kvroute.router.dispatch.holding import (
    MOST_REFUSED_S,
    RECOVERY_S,
    WAITING,
    Holding,
    Turn,
    no_replica,
)
from kvroute.router.dispatch.losses import Losses, lost
from kvroute.router.dispatch.seating import Seating
from kvroute.router.placement.attempts import Attempt, Outcome, Placement, RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.wire.link import FailedError, LostError, RefusedError, Stream

log = logging.getLogger("kvroute.dispatch")

BEGINNING = 256  # prompts of calls with several that may wait for their first token at a time
POLL_S = 0.1
TRIES = 8  # replicas that are asked before a request waits for one with room ...
FIRST_PAUSE_S = 0.025  # ... for so long; doubles each time
LONGEST_PAUSE_S = 0.5
WAITING_TOKENS = 262_144  # of one call, its bytes counted as tokens: for a slow client
LEAST_TOKENS = 16_384  # of each of its prompts: a whole response is one chunk, of 1 MB here
ANSWER_S = 60.0  # for a replica to answer a question
MANY = 4  # answers; a replica owes them one after the other where it processes images
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
        """Cancels the request at the replica; a second call does nothing."""
        self.rest.cancel()
        self.attempt.end()


class Generation:
    """One prompt's stream of chunks, from one replica, or from several if replicas are lost."""

    def __init__(
        self,
        dispatcher: "Dispatcher",
        request: GenerateRequest,
        call: HttpCall,
        context: RequestContext,
        current: ReplicaStream,
        losses: Losses,
    ) -> None:
        self.replica_id = current.replica_id  # the first one
        self.placement = current.placement  # what was known when it was chosen
        self.wait = current.attempt.context.wait  # before it was sent
        self.retention = current.attempt.context.retention
        self.cached_tokens = current.first.cached_tokens  # as the first replica reported
        self._written_tokens = current.first.http.written_tokens if current.first.http else 0
        self.request_id = request.request_id  # as the engine knows it
        self.token_ids = request.token_ids
        self.features = request.features
        self._dispatcher = dispatcher
        self._request = request
        self._call = call
        self._context = replace(  # when it is sent again
            context, is_resumed=True, retention=self.retention
        )
        self._current = current
        self._first: Chunk | None = current.first  # until it was read
        self._losses = losses
        self._emitted: list[int] = []  # token ids; of all choices, where there are several
        self._deltas: list[int] = []  # tokens in each of the engine's outputs
        self._parts_can_continue = True
        self._has_data = False  # some of the response was read

    @property
    def expected_tokens(self) -> int:
        """Prompt tokens that the router expected in the first replica's cache."""
        return self.placement.expected_tokens(self.replica_id)

    async def next(self) -> Chunk | None:
        """What has come since the last call, from whichever replica; None after the last chunk.
        ApiError when no replica can continue."""
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
        """Whether the replica's HTTP application has refused the call; it then has no tokens."""
        return _is_refused(self._current.first)

    def _note(self, part: HttpPart) -> None:
        self._deltas.extend(part.deltas)
        self._parts_can_continue &= part.can_continue
        self._has_data |= bool(part.data)

    def close(self) -> None:
        """Ends the request, complete or not; a second call does nothing."""
        self._current.close()

    async def _later(self) -> Chunk | None:
        current = self._current
        try:
            chunk = await current.rest.next()
        except LOST as error:
            if current.attempt.is_complete:
                return None
            current.attempt.end("failed")  # nothing to cancel: it is dead, or is being killed
            _lose(self._losses, current.replica_id, current.attempt, error)
            return await self._resume(error)
        except Exception as error:
            current.attempt.end(_outcome(error))
            if refusal := _refusal(error):
                raise refusal from error
            raise
        if chunk is not None:
            current.attempt.receive(chunk, time.monotonic())
        return chunk

    async def _resume(self, error: BaseException) -> Chunk:
        """The first chunk of another replica, which continues where the lost one stopped."""
        replica_id = self._current.replica_id
        log.info("replica %s was lost after %d tokens", replica_id, len(self._emitted))
        if not self._can_continue():
            raise lost(
                replica_id,
                "and no other can go on exactly there, as it has n above 1 or a presence_penalty, "
                "for example",
            ) from error
        self._current = await self._dispatcher.start(self._rest(), self._context, self._losses)
        return self._current.first

    def _can_continue(self) -> bool:
        return self._parts_can_continue or not self._has_data

    def _rest(self) -> GenerateRequest:
        """The request for another replica: what is left, or all of it if the client has nothing."""
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


class Dispatcher:
    """Sends each prompt to a replica in the order of the fleet's ranking.

    shared_tokens: how many of a text's first tokens are a shared prefix's. seating: None: sessions
    need no seats.
    """

    def __init__(
        self,
        links: Links,
        fleet: Fleet,
        liveness: Liveness,
        holding: Holding,
        *,
        shared_tokens: Callable[[TokenIds], int] = lambda token_ids: 0,
        blamed: Blamed | None = None,
        seating: Seating | None = None,
    ) -> None:
        self._blamed = blamed or Blamed()
        self._seating = seating
        self._shared_tokens = shared_tokens
        self._links = links
        self._fleet = fleet
        self._liveness = liveness
        self._holding = holding
        self._waiting = 0  # requests, for a replica with room
        self._turns = Turns()
        self._beginning = {is_batch: asyncio.Semaphore(BEGINNING) for is_batch in (False, True)}

    async def begin(
        self,
        token_ids: TokenIds,
        call: HttpCall,
        context: RequestContext,
    ) -> Generation:
        """Returns with the first chunk. ApiError: no replica is ready, or the engine refuses.
        OverLimitError: the tenant has no room for it."""
        dispatch = dispatch_id(context.request_id)
        request = GenerateRequest(
            dispatch,
            token_ids,
            context.namespace,
            lora=context.lora,
            call=call,
            features=context.features,
            shared_tokens=self.shared_tokens(token_ids, context.namespace, context.features),
        )
        losses = Losses()
        current = await self.start(request, context, losses)
        return Generation(self, request, call, context, current, losses)

    def shared_tokens(
        self, token_ids: TokenIds, namespace: str, features: Sequence[Feature]
    ) -> int:
        """How many of a prompt's first tokens are everybody's in spite of its namespace. No image
        is: what a shared prefix has are token ids."""
        text = token_ids[: features[0].offset] if features else token_ids
        return self._shared_tokens(text) if namespace else 0

    async def begin_in_turn(
        self,
        token_ids: TokenIds,
        call: HttpCall,
        context: RequestContext,
    ) -> Generation:
        """The same for a further prompt of a call. Calls with many prompts take turns, and requests
        with one prompt do not wait for them. The first prompt decides whether the call waits too
        long."""
        context = replace(context, urgency=context.urgency.without_bound())
        async with self._beginning[context.urgency.is_batch]:
            await self._turns.next()
            return await self.begin(token_ids, call, context)

    async def ask(
        self,
        method: str,
        body: bytes,
        *,
        within_s: float = ANSWER_S,
        prefer: Callable[[Collection[str]], str] | None = None,
    ) -> bytes:
        """The answer to a question that every replica can answer, by one of those that owe the
        fewest answers. ApiError when none does, or when engines die of it.

        prefer: the replica that is asked, of these, unless it owes MANY more than others.
        """
        gone, losses = set[str](), Losses()
        for _ in range(TRIES):
            running = await self._running(gone)
            replica_id = self._asked(running, prefer)
            try:
                return await self._links.call(replica_id, method, body, within_s=within_s)
            except LateError as error:  # the next one would only have the same to do
                busy = f"replica {replica_id} is too busy: {error}"
                raise ApiError(503, busy, type="server_error") from error
            except UnansweredError as error:
                log.info("replica %s did not answer %s: %s", replica_id, method, error)
                gone.add(replica_of(replica_id))
                if words := _words(error.__cause__):
                    losses.add(
                        replica_id, died=True, is_gone=True, held_s=0.0, tokens=0, words=words
                    )
                    losses.check()
                if len(gone) == len(replicas_of(self._liveness.trusted())):
                    break
        raise ApiError(503, "no replica answers; try again", type="server_error")

    def _asked(
        self, running: Collection[str], prefer: Callable[[Collection[str]], str] | None
    ) -> str:
        owed = {id_: self._links.owed(id_) for id_ in running}
        least = min(running, key=lambda id_: (owed[id_], random.random()))
        preferred = prefer(running) if prefer else least
        return preferred if owed[preferred] <= owed[least] + MANY else least

    async def start(
        self, request: GenerateRequest, context: RequestContext, losses: Losses
    ) -> ReplicaStream:
        """A stream with its first chunk; replicas that die meanwhile are added to `losses`.
        ApiError as above, and when too many replicas die. OverLimitError."""
        pause_s = FIRST_PAUSE_S
        turn = Turn(context.at_s) if context.is_resumed else None
        seating, seat_s = None if context.is_resumed else self._seating, 0.0
        while True:
            self._blamed.check(request)
            self._check(losses, request)
            running = await self._running(losses.gone, context.urgency)
            if turn and turn.among:
                running = [id_ for id_ in running if id_ in turn.among] or running
            now_s = time.monotonic()
            placement = self._fleet.place(
                request.token_ids, running, now_s, request.scope, request.features
            )
            self._fleet.observer.placed(placement, time.monotonic() - now_s)
            if context.entry is not None:
                tokens, new_tokens = placement.prompt_tokens, placement.new_tokens
                context.entry.admit(request.request_id, tokens, new_tokens, now_s)
            retention = context.retention or self._fleet.retention(placement, context.said)
            context = replace(context, retention=retention)
            if seating is not None:
                seat_s, seating = await seating.seat(placement, context), None
                if seat_s:
                    context = replace(context, urgency=context.urgency.after(seat_s))
                    continue  # what replicas have cached has changed
            if turn is None:
                turn = await self._holding.turn(placement, context)
                context = replace(context, wait=turn.wait.after_seat(seat_s))
                if turn.wait.reason != "none":
                    continue  # the same
            request = replace(
                request,
                order_s=turn.at_s - now_s,
                waited_s=max(turn.missed_s, min(seat_s, MOST_REFUSED_S)),
                keep=retention.keep,
            )
            try:
                return await self._try(request, context, placement, losses)
            except RefusedError:
                await self._wait(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            except LOST:
                continue

    def _check(self, losses: Losses, request: GenerateRequest) -> None:
        """ApiError when no other replica may get the request; then none gets its like either."""
        try:
            losses.check()
        except ApiError as error:
            if losses.is_cause:
                self._blamed.add(request, f"earlier, {error}")
            raise

    async def _running(self, gone: Collection[str], urgency: Urgency = AT_EASE) -> list[str]:
        """The ranks that may get a request; waits for one if there is none, for no longer than the
        request says. gone: replicas."""
        within_s = RECOVERY_S if urgency.own_s is None else min(RECOVERY_S, urgency.own_s)
        deadline = time.monotonic() + within_s
        while not (running := _left(self._liveness.trusted(), gone)):
            if time.monotonic() >= deadline:
                self._fleet.observer.turned_away(urgency.priority, "no_replica")
                raise no_replica()
            await asyncio.sleep(POLL_S)
        return running

    async def _wait(self, pause_s: float) -> None:
        """For a replica with room. ApiError when too many requests wait."""
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
        """A stream from the first replica in the ranking that has room. RefusedError: none of the
        best has. One of LOST: a replica was lost before its first chunk."""
        sent_s, full = time.monotonic(), set[str]()  # replicas: all ranks of one have the same room
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
                _lose(losses, replica_id, attempt, error)
                raise
        raise RefusedError("every replica")

    async def _begin(
        self, request: GenerateRequest, placement: Placement, attempt: Attempt, losses: Losses
    ) -> ReplicaStream:
        """The attempt's replica has the request and has sent its first chunk."""
        expected_tokens = attempt.dispatch.prompt_tokens - attempt.dispatch.new_tokens
        request = replace(request, expected_tokens=expected_tokens, trace=attempt.trace)
        stream = None
        try:
            stream = self._links.open(
                attempt.replica_id, request, most_waiting=_most_waiting(attempt.context)
            )
            first = await stream.next()
        except BaseException as error:
            attempt.end(_outcome(error))
            if stream is not None:
                stream.cancel()
                if isinstance(error, HungError) and losses.has_stopped(stream.stopped_among):
                    self._blame(request, attempt.replica_id)
            if refusal := _refusal(error):
                raise refusal from error
            raise
        assert first is not None, "an engine's stream has at least its end"
        if _is_refused(first):
            attempt.end("refused")
        else:
            attempt.receive(first, time.monotonic())
        return ReplicaStream(attempt.replica_id, placement, first, stream, attempt)

    def _blame(self, request: GenerateRequest, replica_id: str) -> None:
        """The replica stopped while its loop prepared this request."""
        log.warning("request %s has stopped replica %s", request.request_id, replica_id)
        self._blamed.add(request, f"replica {replica_id} stopped while it prepared this request")


def _left(rank_ids: list[str], gone: Collection[str]) -> list[str]:
    """The ranks of other replicas."""
    return [id_ for id_ in rank_ids if replica_of(id_) not in gone] if gone else rank_ids


def _most_waiting(context: RequestContext) -> int:
    """How much may wait for a client that reads slowly."""
    return max(LEAST_TOKENS, WAITING_TOKENS // context.prompts)


def _is_refused(first: Chunk) -> bool:
    """Whether this is an HTTP error instead of an answer."""
    return first.http is not None and first.http.status >= 400 and not first.token_ids


def _lose(losses: Losses, replica_id: str, attempt: Attempt, error: Exception) -> None:
    losses.add(
        replica_id,
        died=not isinstance(error, HungError),
        is_gone=not isinstance(error, LostError),  # a dead one is never connected again
        held_s=time.monotonic() - attempt.sent_s,
        tokens=attempt.output_tokens,
        words=_words(error),
    )


def _words(error: BaseException | None) -> str:
    """Why the engine died, if it did under the request."""
    return str(error) if isinstance(error, EngineDeadError) else ""


def _outcome(error: BaseException) -> Outcome:
    match error:
        case asyncio.CancelledError():
            return "cancelled"
        case RefusedError():
            return "moved"
        case ValueError():
            return "refused"
    return "failed"


def _refusal(error: BaseException) -> ApiError | None:
    """The error for the client; None where another replica may do better, or nobody knows."""
    match error:
        case ValueError():
            return invalid(None, str(error))
        case FailedError():
            return ApiError(
                500, "a replica failed to answer; its log says why", type="server_error"
            )
    return None
