"""What one router sends, the others know within milliseconds.

Routers that judge by their own requests alone pile onto the same replica. So each one publishes its
dispatches, first tokens and ends, and takes the others' into account like its own. It is a hint: a
lost message costs balance. What a router might have missed ends with what it heard before.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable

import msgspec
from redis.exceptions import RedisError

from replica.kvindex.index import Index, pack, unpack
from replica.kvindex.outage import Outage
from router.routing.fleet import Fleet
from router.routing.trips import Dispatch, Trip, Witness

log = logging.getLogger("kvroute.peers")

WAITING_EVENTS = 10_000  # not yet published; more are given up, and the others told so
ALIVE_S = 1.0  # between a router's signs of life
SILENCE_S = 4.0  # after which its requests are taken for ended
RETRY_S = 0.5  # between attempts while Redis is away


class Sent(msgspec.Struct, tag="s", array_like=True):
    request_id: str
    replica_id: str
    prefill_s: float
    new_tokens: int
    prompt_tokens: int
    known_prefix: bytes
    expected: bytes
    lora: str = ""
    loads_lora: bool = False


class FirstToken(msgspec.Struct, tag="f", array_like=True):
    request_id: str


class Ended(msgspec.Struct, tag="e", array_like=True):
    request_id: str


class Restarted(msgspec.Struct, tag="r", array_like=True):
    """Whatever this router said before does not hold any more."""


Event = Sent | FirstToken | Ended | Restarted


class Message(msgspec.Struct, array_like=True):
    router: str
    events: list[Event]  # none: a sign of life


class Loudspeaker(Witness):
    """Tells the other routers about this one's requests; `router`: its id, else a new one."""

    def __init__(self, router: str | None = None) -> None:
        self.router = router or uuid.uuid4().hex[:12]
        self._events: list[Event] = [Restarted()]
        self._has_events = asyncio.Event()

    def sent(self, trip: Trip) -> None:
        dispatch = trip.dispatch
        self._say(
            Sent(
                dispatch.request_id,
                dispatch.replica_id,
                dispatch.prefill_s,
                dispatch.new_tokens,
                dispatch.prompt_tokens,
                pack(dispatch.known_prefix),
                pack(dispatch.expected),
                dispatch.lora,
                dispatch.loads_lora,
            )
        )

    def first_token(self, trip: Trip) -> None:
        self._say(FirstToken(trip.request_id))

    def ended(self, trip: Trip) -> None:
        self._say(Ended(trip.request_id))

    def take(self) -> Message:
        """What was said since the last time, in order."""
        events, self._events = self._events, []
        return Message(self.router, events)

    async def run(self, index: Index) -> None:
        """Publishes what was said, at once and in order, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_S):
                    await self._has_events.wait()
            self._has_events.clear()
            try:
                await index.tell_routers(msgspec.msgpack.encode(self.take()))
            except (RedisError, OSError):
                self._events = [Restarted()]
                await asyncio.sleep(RETRY_S)

    def _say(self, event: Event) -> None:
        if len(self._events) >= WAITING_EVENTS:
            self._events = [Restarted()]
        self._events.append(event)
        self._has_events.set()


class Listener:
    """Takes the other routers' requests into account."""

    def __init__(
        self, fleet: Fleet, *, own: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.own = own
        self._fleet = fleet
        self._clock = clock
        self._decoder = msgspec.msgpack.Decoder(Message)
        self._trips: dict[str, dict[str, Trip]] = {}  # router -> request id -> trip
        self._outage = Outage(log, "other routers are not heard")
        self._heard_s: dict[str, float] = {}  # router -> when it last said anything

    @property
    def heard(self) -> int:
        """The other routers that lately gave a sign of life."""
        return len(self._heard_s)

    async def run(self, index: Index) -> None:
        """Listens until cancelled."""
        while True:
            try:
                async for payload in index.told_by_routers(wait_s=ALIVE_S):
                    self._outage.end()
                    if payload is not None:
                        self.hear(self._decoder.decode(payload))
                    self.forget_silent()
            except (RedisError, OSError) as error:
                self._outage.begin(error)
                self.forget_all()
                await asyncio.sleep(RETRY_S)

    def hear(self, message: Message) -> None:
        if message.router == self.own:
            return
        self._heard_s[message.router] = self._clock()
        trips = self._trips.setdefault(message.router, {})
        for event in message.events:
            match event:
                case Sent():
                    trips[event.request_id] = self._fleet.begin(_dispatch(event), self._clock())
                case FirstToken():
                    if trip := trips.get(event.request_id):
                        trip.first_token(self._clock())
                case Ended():
                    if ended := trips.pop(event.request_id, None):
                        ended.end()
                case Restarted():
                    _end(trips)

    def forget_silent(self) -> None:
        """Ends the requests of routers that gave no sign of life: they died, or we are cut off."""
        limit_s = self._clock() - SILENCE_S
        for router in [router for router, at_s in self._heard_s.items() if at_s < limit_s]:
            self._forget(router)

    def forget_all(self) -> None:
        for router in list(self._heard_s):
            self._forget(router)

    def _forget(self, router: str) -> None:
        del self._heard_s[router]
        _end(self._trips.pop(router, {}))


def _end(trips: dict[str, Trip]) -> None:
    for trip in trips.values():
        trip.end()
    trips.clear()


def _dispatch(event: Sent) -> Dispatch:
    return Dispatch(
        event.request_id,
        event.replica_id,
        event.prefill_s,
        event.new_tokens,
        event.prompt_tokens,
        unpack(event.known_prefix),
        unpack(event.expected),
        event.lora,
        event.loads_lora,
    )
