"""One run of a background response by this router, to its end."""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.responses.background.events import Events, event_of
from kvroute.features.responses.background.own_request import ask
from kvroute.features.responses.stores.background_store import (
    BackgroundBody,
    Head,
    Record,
    Status,
)
from kvroute.features.responses.stores.leased_values import TooLongError
from kvroute.router.api.json_members import Members, encode, members
from kvroute.store.connection import REDIS_ERRORS

if TYPE_CHECKING:
    from kvroute.features.responses.background.background_responses import BackgroundResponses

log = logging.getLogger("kvroute.background")

FLUSH_S = 0.25  # events are written to Redis once per this many seconds
BEAT_S = 2.0  # a router writes the state of each response at least this often
AGAIN_S = 1.0  # the first pause before a refused request is sent again; each further one is longer
LONGEST_PAUSE_S = 30.0
BUSY = (429, 502, 503, 504)  # statuses with which a request is sent again


TOO_LARGE = "the answer takes more than a sixteenth of --response-store-mb"


class LostRunError(Exception):
    """The response was cancelled, deleted or taken over by another router."""


class BackgroundRun:
    """One run of a response.

    Args:
        service: the background responses of this router.
        record: the response, which this router has claimed.
        body: what the response is made of.
    """

    def __init__(
        self, service: "BackgroundResponses", record: Record, body: BackgroundBody
    ) -> None:
        self._service = service
        self._store = service.store
        self.key = record.key
        self._record = record
        self._body = body
        # Clients of the first run have an event about the queued response already.
        self._events = Events(record.head.events, is_created=record.head.attempts <= 1)
        self._written_s = time.monotonic()
        self._unwritten = b""  # events that are not in Redis, or only without the state behind them
        # The state of a write that has failed, and the size of its events: Redis may have it
        # nevertheless. None: no write has failed.
        self._unsure: tuple[Head, int] | None = None
        self._refusal = b""  # the body of a response with an error
        self._status, self._headers = 0, dict[str, str]()

    async def run(self) -> Status | None:
        """Run the response to its end.

        Returns:
            The response's last status. None: this router does not run it any more.
        """
        asking = asyncio.create_task(self._ask())
        try:
            await self._keep(asking)
            status, response = asking.result()
            await self._end(status, response)
            return status
        except LostRunError:
            return None
        finally:
            asking.cancel()
            await asyncio.wait((asking,))

    async def release(self) -> None:
        """Let another router run the response, since this router stops."""
        with suppress(*REDIS_ERRORS):
            found = await self._store.read(self.key)
            if found is not None and found.head.router == self._record.head.router:
                await self._store.replace(found, replace(found.head, router=""))

    async def _ask(self) -> tuple[Status, Members]:
        """Send the request until a replica has answered it; return the response's last state."""
        service, body = self._service, self._body
        request = {**members(body.request), "stream": True, "request_id": body.id}
        pause_s = AGAIN_S
        while (caller := service.caller(body)) is not None:
            self._refusal = b""
            await ask(
                service.application,
                encode(request),
                headers=body.headers,
                caller=caller,
                started=self._started,
                received=self._received,
            )
            if self._status == 200:
                return self._answered()
            is_late = self._store.clock.now_s() > body.created_at + service.store.ttl_s
            if self._status not in BUSY or is_late:
                return self._failed(_error(self._refusal))
            await asyncio.sleep(_seconds(self._headers.get("retry-after"), pause_s))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        return self._failed({"message": "the tenant has no API key any more"})

    def _started(self, status: int, headers: Mapping[str, str]) -> None:
        self._status, self._headers = status, dict(headers)

    async def _received(self, data: bytes) -> None:
        if self._status == 200:
            self._events.add(data)
        else:
            self._refusal += data

    def _answered(self) -> tuple[Status, Members]:
        events = self._events
        if events.status is not None and events.response is not None:
            return events.status, events.response
        error = events.error or {}
        return self._failed({name: _decoded(raw) for name, raw in error.items()})

    def _failed(self, error: Mapping[str, Any]) -> tuple[Status, Members]:
        """Return the response as one that has failed, and add the event that says so."""
        latest = members(self._body.response)
        message = str(error.get("message") or "the answer has ended before its end")
        code = "invalid_prompt" if 400 <= self._status < 500 else "server_error"
        shown = {"status": "failed", "error": {"code": code, "message": message}}
        response = latest | {name: msgspec.Raw(encode(value)) for name, value in shown.items()}
        self._events.add(event_of("response.failed", response, 0))
        return "failed", response

    async def _keep(self, asking: asyncio.Task[Any]) -> None:
        """Write events and the state to Redis, until the request has been answered.

        Raises:
            LostError: the response does not belong to this router any more.
        """
        while not asking.done():
            await asyncio.wait((asking,), timeout=FLUSH_S)
            if not asking.done():
                # What fails is written later: when Redis is back, or at the end.
                with suppress(*REDIS_ERRORS, TooLongError):
                    await self._flush("in_progress" if self._events.response else "queued")

    async def _flush(self, status: Status, response: Members | None = None) -> None:
        """Write new events, and the state if there are any or if it is time to."""
        await self._resolve()
        head = self._record.head
        is_due = time.monotonic() - self._written_s > BEAT_S
        self._unwritten += self._events.taken()
        number_of_next = self._events.next
        if not self._unwritten and not is_due and status == head.status:
            return
        if data := self._unwritten:
            await self._store.put_events(self.key, head.chunks, data)
        changed = replace(
            head,
            status=status,
            chunks=head.chunks + bool(data),
            events=number_of_next,
            beats=head.beats + 1,
        )
        if head.status == "queued":
            response = response or self._events.response
        body = None
        if response is not None:
            body = replace(self._body, response=msgspec.Raw(encode(response)))
        self._unsure = changed, len(data)
        written = await self._store.replace(self._record, changed, body)
        self._unsure = None
        if written is None:
            raise LostRunError
        self._accept(written, len(data))

    async def _resolve(self) -> None:
        """Find out whether Redis has what a failed write has sent.

        The events of a write that was done must not be sent again: clients may have them.

        Raises:
            LostError: the response does not belong to this router any more.
        """
        if self._unsure is None:
            return
        head, size = self._unsure
        found = await self._store.read(self.key)
        self._unsure = None
        if found is not None and found.head == head:
            self._accept(found, size)
        elif found is None or found.first != self._record.first:
            raise LostRunError

    def _accept(self, written: Record, size: int) -> None:
        """Note what Redis has now, with `size` bytes of the events that were not written."""
        self._record, self._written_s = written, time.monotonic()
        self._unwritten = self._unwritten[size:]

    async def _end(self, status: Status, response: Members) -> None:
        """Write the last state, as soon as Redis can be written."""
        while True:
            try:
                return await self._flush(status, response)
            except TooLongError:
                status, response = self._failed({"message": TOO_LARGE})
            except REDIS_ERRORS as error:
                log.warning("a background response cannot be written yet: %s", error)
                await asyncio.sleep(AGAIN_S)


def _error(refusal: bytes) -> Mapping[str, Any]:
    """Return the error of a response, or nothing if the response has none."""
    try:
        return dict(msgspec.json.decode(refusal)["error"])
    except (*DECODE_ERRORS, LookupError, TypeError):
        return {}


def _decoded(raw: msgspec.Raw) -> object:
    return msgspec.json.decode(raw)


def _seconds(header: str | None, otherwise: float) -> float:
    try:
        return min(LONGEST_PAUSE_S, max(0.0, float(header or otherwise)))
    except ValueError:
        return otherwise
