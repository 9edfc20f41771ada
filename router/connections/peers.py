"""Messages between routers, so that each knows the other routers' requests within milliseconds.

Routers that know only their own requests would send them to the same replica and overload it. So
each router publishes an event when one of its requests is dispatched, gets its first token or ends,
and counts the requests of other routers like its own. These messages are hints: if one is lost,
only the load is balanced less well. If a router may have missed messages of another router, it
treats all requests of that router as ended.

While a fleet is upgraded, two Ray clusters may share the id of the cluster, and so the channel. Of
a router of the other one, only what does not concern its replicas counts: requests that stop
replicas, the ends of sessions, and what some features share.
"""

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Callable
from typing import Any

from kvroute.contract.messages import (
    Dispatch,
    Event,
    FirstToken,
    LearnedScale,
    PoisonedRequest,
    RequestEnded,
    Restarted,
    RouterMessage,
    SessionEnded,
    decode,
    encode,
)
from kvroute.contract.records import VERSION
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.placing_feature import NO_FEATURES, PlacingFeatures
from kvroute.router.placement.attempts import Attempt, RequestObserver
from kvroute.router.placement.fleet import Fleet
from kvroute.router.queueing.queue import Queue
from kvroute.store.connection import REDIS_ERRORS, Outage
from kvroute.store.index import Index

log = logging.getLogger("kvroute.peers")

# Largest number of events that wait to be published. If there is one more, all are dropped, and
# Restarted is sent: then the other routers treat all earlier requests of this router as ended.
MAX_EVENTS = 10_000
BATCH_S = 0.002  # seconds between two messages of one router
ALIVE_S = 1.0  # seconds between a router's heartbeats
SILENCE_S = 4.0  # seconds without a message after which a router's requests count as ended
# A router that receives no message for this many seconds, not even its own, counts as cut off from
# the other routers.
CUT_OFF_S = 2.0
RETRY_S = 0.5  # seconds between attempts to reach Redis during an outage


class PeerPublisher(RequestObserver):
    """Publishes this router's requests, its queue and what features share to the other routers."""

    def __init__(
        self,
        router: str | None = None,
        *,
        queue: Queue[Any] | None = None,
        features: PlacingFeatures = NO_FEATURES,
        scale: Callable[[], LearnedScale | None] = lambda: None,
        origin: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the publisher, and publish changes of the queue and of features from now on.

        Args:
            router: id of this router; random by default.
            origin: this router's Ray cluster and application.
            scale: returns this router's mean prefill times, for routers that have just started;
                None if there are none.
            clock: returns seconds of a monotonic clock.
        """
        self._scale = scale
        self._scale_sent_s = -math.inf  # time when the result of `scale` was last published
        self.router = router or uuid.uuid4().hex[:12]
        self._origin = origin
        self._queue = queue
        self._features = features
        self._clock = clock
        self._events: list[Event] = [Restarted()]
        self._has_events = asyncio.Event()
        if queue is not None:
            queue.on_change = self._has_events.set
        for feature in features.sharing:
            feature.on_change = self._has_events.set

    def sent(self, attempt: Attempt) -> None:
        self._emit(attempt.dispatch)

    def first_token(self, attempt: Attempt) -> None:
        self._emit(FirstToken(attempt.request_id))

    def ended(self, attempt: Attempt) -> None:
        self._emit(RequestEnded(attempt.request_id, attempt.is_over))

    def blamed(self, digest: bytes) -> None:
        """Publish the digest of a request that crashed a replica or made it hang."""
        self._emit(PoisonedRequest(digest))

    def session_ended(self, session: int) -> None:
        self._emit(SessionEnded(session))

    def next_message(self) -> RouterMessage:
        """Return the next message: the events since the last call, and the current counts."""
        events, self._events = self._events, []
        now_s = self._clock()
        waiting = None if self._queue is None else self._queue.report(now_s)
        scale = self._scale() if now_s >= self._scale_sent_s + ALIVE_S else None
        if scale is not None:
            self._scale_sent_s = now_s
        return RouterMessage(
            version=VERSION,
            router=self.router,
            events=events,
            waiting=waiting,
            scale=scale,
            origin=self._origin,
            features=self._features.share(now_s),
        )

    async def run(self, index: Index, others: "PeerSubscriber") -> None:
        """Publish the events in order, within milliseconds, until cancelled.

        While there is no other router, publish heartbeats only, so that new routers find this one.
        A router that was only silent may still count requests of this one. So the next events begin
        with Restarted.
        """
        due_s = -math.inf  # time of the next heartbeat
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_S):
                    await self._has_events.wait()
            self._has_events.clear()
            if not others.alive and time.monotonic() < due_s:
                self._events = [Restarted()]
                await asyncio.sleep(BATCH_S)
                continue
            due_s = time.monotonic() + ALIVE_S
            try:
                await index.publish_to_routers(encode(self.next_message()))
                await asyncio.sleep(BATCH_S)
            except REDIS_ERRORS:
                self._events = [Restarted()]
                due_s = -math.inf
                await asyncio.sleep(RETRY_S)

    def _emit(self, event: Event) -> None:
        if len(self._events) >= MAX_EVENTS:
            self._events = [Restarted()]
        self._events.append(event)
        self._has_events.set()


class PeerSubscriber:
    """Receives the other routers' messages, and counts their requests as load of the replicas."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        own: str,
        origin: str = "",
        clock: Callable[[], float] = time.monotonic,
        queue: Queue[Any] | None = None,
        blamed: Callable[[bytes], object] = lambda digest: None,
    ) -> None:
        """Create the subscriber.

        Args:
            own: id of this router, whose messages are ignored.
            origin: this router's Ray cluster and application.
            blamed: called with the digest of a request that crashed a replica or made it hang.
        """
        self.own = own
        self._origin = origin
        self._blamed = blamed
        self._fleet = fleet
        self._queue = queue
        # Time of the last message of any router, including this one.
        self._last_received_s = -math.inf
        # Start of the current period in which messages arrive without a gap of CUT_OFF_S.
        self._connected_since_s = 0.0
        self._clock = clock
        self._attempts: dict[str, dict[str, Attempt]] = {}  # router -> request id -> attempt
        self._outage = Outage(log, "the requests of other routers are unknown")
        self._last_message_s: dict[str, float] = {}  # router -> time of its last message

    @property
    def alive(self) -> int:
        """Return the number of other routers with a recent heartbeat."""
        return len(self._last_message_s)

    async def run(self, index: Index) -> None:
        """Receive messages until cancelled."""
        while True:
            try:
                async for payload in index.router_messages(wait_s=ALIVE_S):
                    self._outage.end()
                    if payload is not None:
                        self.receive_packed(payload, index)
                    self.forget_silent()
            except REDIS_ERRORS as error:
                self._outage.begin(error)
                self.forget_all()
                await asyncio.sleep(RETRY_S)

    def receive_packed(self, payload: bytes, index: Index) -> None:
        """Decode and process a message. Count it in the index's statistics if it is unreadable."""
        try:
            message = decode(payload)
        except DECODE_ERRORS as error:
            index.unreadable.add("message", "on the routers' channel", error)
            return
        self.receive(message)

    def receive(self, message: RouterMessage) -> None:
        """Process a message of another router.

        A message of this router itself only shows that messages arrive.
        """
        self._record_message()
        if message.router == self.own:
            return
        self._last_message_s[message.router] = now_s = self._clock()
        is_own = message.origin in ("", self._origin)
        if is_own:
            self._receive_load(message, now_s)
        self._fleet.features.receive(message.router, message.features, now_s, is_own=is_own)
        for event in message.events:
            match event:
                case PoisonedRequest():
                    self._blamed(event.digest)
                case SessionEnded():
                    self._fleet.end_session(event.session)

    def _receive_load(self, message: RouterMessage, now_s: float) -> None:
        """Count the requests of another router that has the same replicas."""
        if self._queue is not None and message.waiting is not None:
            self._queue.receive(message.router, message.waiting, now_s)
        if message.scale is not None:
            self._fleet.loads.scale.adopt(message.scale)
        attempts = self._attempts.setdefault(message.router, {})
        for event in message.events:
            match event:
                case Dispatch():
                    if earlier := attempts.pop(event.request_id, None):
                        earlier.end()
                    attempts[event.request_id] = self._fleet.begin(event, self._clock())
                    if self._queue is not None:
                        self._queue.taken(event.replica_id)
                case FirstToken():
                    if attempt := attempts.get(event.request_id):
                        attempt.first_token(self._clock())
                case RequestEnded():
                    if ended := attempts.pop(event.request_id, None):
                        ended.end_elsewhere(self._clock(), is_over=event.is_final)
                case Restarted():
                    _end(attempts)

    def forget_silent(self) -> None:
        """End the requests of silent routers: either they died, or this router is disconnected."""
        self._tell_features()
        limit_s = self._clock() - SILENCE_S
        for router in [router for router, at_s in self._last_message_s.items() if at_s < limit_s]:
            self._forget(router)

    def forget_all(self) -> None:
        """End the requests of all other routers, because Redis cannot be reached."""
        self._last_received_s = -math.inf
        self._tell_features()
        for router in list(self._last_message_s):
            self._forget(router)

    def _record_message(self) -> None:
        now_s = self._clock()
        if now_s - self._last_received_s > CUT_OFF_S:
            self._connected_since_s = now_s
        self._last_received_s = now_s

    def _tell_features(self) -> None:
        """Tell features whether this router is cut off from the other ones.

        It is connected again when messages have arrived for SILENCE_S without a gap.
        """
        now_s = self._clock()
        is_cut_off = now_s - self._last_received_s > CUT_OFF_S
        if is_cut_off or now_s - self._connected_since_s >= SILENCE_S:
            for connected in self._fleet.features.connected:
                connected(not is_cut_off, now_s)

    def _forget(self, router: str) -> None:
        del self._last_message_s[router]
        if self._queue is not None:
            self._queue.forget(router)
        self._fleet.features.forget(router)
        _end(self._attempts.pop(router, {}))


def _end(attempts: dict[str, Attempt]) -> None:
    for attempt in attempts.values():
        attempt.end()
    attempts.clear()
