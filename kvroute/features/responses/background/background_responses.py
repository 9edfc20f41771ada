"""The background responses that this router creates, shows and runs."""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar, get_args

import msgspec
from msgspec.structs import replace
from starlette.types import ASGIApp

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features import HEADERS as FEATURE_HEADERS
from kvroute.features.gate import OPEN, Caller, Gate
from kvroute.features.responses.background.background_run import BackgroundRun
from kvroute.features.responses.background.events import CREATED, after, event_of, queued
from kvroute.features.responses.response_options import ResponseOptions
from kvroute.features.responses.stores.background_store import (
    BackgroundBody,
    BackgroundStore,
    Head,
    Record,
    Status,
)
from kvroute.features.responses.stores.leased_values import TooLongError, key, owner
from kvroute.features.router_service import RouterService
from kvroute.process.exposition import Readings
from kvroute.router.api.calls import Call
from kvroute.router.api.errors import ApiError, needing_redis
from kvroute.router.api.json_members import Members, encode, members
from kvroute.router.api.sessions import HEADERS as SESSION_HEADERS
from kvroute.router.api.urgency import HEADERS as URGENCY_HEADERS
from kvroute.router.endpoints.idempotency import reused
from kvroute.router.endpoints.openai_routes import RECEIPT
from kvroute.router.serving.router_base import RouterBase
from kvroute.store.connection import REDIS_ERRORS, connect

log = logging.getLogger("kvroute.background")

T = TypeVar("T")

WATCH_S = 2.0  # a router looks for responses that nobody runs once per this many seconds
LEASE_S = 10.0  # a response whose state has not changed for so long is run by another router
STOP_S = 2.0  # the most seconds that stopping waits until other routers may run the responses
POLL_S = 0.2  # pause between two looks for new events of a response
MAX_OPEN = 1024  # the most responses of a cluster that have not ended
MAX_OPEN_OF_TENANT = 256  # the most open responses of one tenant, if there are API keys
MAX_ATTEMPTS = 5  # a response that so many routers have begun to run fails
GIVEN_UP = f"{MAX_ATTEMPTS} routers have begun to run the response, and none has ended it"
NULL = b"null"
FAILED = b"event: response.failed\n"  # beginning of the last event of a response that has failed
KEPT_HEADERS = (RECEIPT, *FEATURE_HEADERS, *SESSION_HEADERS, *URGENCY_HEADERS)
QUEUED_EVENTS = (CREATED, "response.queued")  # the types of the first events of a response
Result = TypeVar("Result")


class BackgroundResponses(RouterService):
    """All background responses of a cluster, as one router reads, changes and runs them.

    Args:
        router_id: the id of this router.
        store: the responses in Redis. A request that no replica takes in its `ttl_s` fails.
        gate: tells who may still send requests.
    """

    name = "responses"

    def __init__(self, router_id: str, store: BackgroundStore, gate: Gate = OPEN) -> None:
        self.ended = Counter[str](dict.fromkeys(get_args(Status)[2:], 0))  # by their last status
        self._router_id = router_id
        self.store = store
        self._gate = gate
        self._runs: dict[bytes, tuple[BackgroundRun, asyncio.Task[None]]] = {}
        # Responses of other routers: KEY -> their state, and when this router has first seen it.
        self._seen: dict[bytes, tuple[Head, float]] = {}
        # Reads for the clients that stream responses.
        self._heads, self._events = SharedReads[Head | None](), SharedReads[bytes | None]()

    def attach(self, application: ASGIApp) -> None:
        self.application = application

    def start(self) -> None:
        self.running = [asyncio.create_task(self._watch())]

    def metrics(self, readings: Readings) -> None:
        readings.gauge(
            "kvroute_background_responses_running",
            "Background responses that this router runs.",
            lambda: len(self._runs),
        )
        readings.labelled_counter(
            "status",
            "kvroute_background_responses",
            "Background responses that have ended in this router, by status: completed, "
            "incomplete, failed, cancelled.",
            lambda: self.ended,
        )

    async def stop(self) -> None:
        """Stop all runs, and let other routers run the responses."""
        for task in self.running:
            task.cancel()
        runs, self._runs = self._runs, {}
        for _, task in runs.values():
            task.cancel()
        releases = [asyncio.create_task(run.release()) for run, _ in runs.values()]
        if releases:
            await asyncio.wait(releases, timeout=STOP_S)

    async def create(self, call: Call, headers: Mapping[str, str], id_: str = "") -> Record:
        """Store a new response, and run it in the background.

        Args:
            call: the request, which a replica would accept.
            id_: the response's id; empty: a new one. If there is such a response, it is returned.

        Raises:
            ApiError: too many responses have not ended, Redis cannot be used, or there is another
                request's response with this id.
        """
        tenant, salt = call.caller.tenant, owner(call.caller, call.body.get("cache_salt"))
        id_ = id_ or f"resp_{uuid.uuid4().hex}"
        if (earlier := await self.find(id_, salt)) is not None:
            return self._same(earlier, call)
        with needing_redis():
            tenants = list((await self.store.open()).values())
        if len(tenants) >= MAX_OPEN or (tenant and tenants.count(tenant) >= MAX_OPEN_OF_TENANT):
            limit = MAX_OPEN if len(tenants) >= MAX_OPEN else MAX_OPEN_OF_TENANT
            raise ApiError(
                429,
                f"{limit} background responses have not ended, which is the limit; wait until some "
                "have ended, or cancel them",
                code="overloaded",
            )
        created_at = int(self.store.clock.now_s())
        body = BackgroundBody(
            id_,
            tenant,
            call.caller.priority,
            _kept(headers),
            created_at,
            msgspec.Raw(call.raw),
            msgspec.Raw(encode(queued(id_, created_at, call.body))),
        )
        head = Head("queued", events=len(QUEUED_EVENTS), router=self._router_id, attempts=1)
        with needing_redis():
            record = await self.store.create(key(id_, salt), head, body)
        if record == "known" and (earlier := await self.find(id_, salt)) is not None:
            return self._same(earlier, call)
        if not isinstance(record, Record):
            raise ApiError(
                413,
                "the body takes more than a sixteenth of --response-store-mb; send a shorter one",
                code="request_too_large",
            )
        self._run(record, body)
        return record

    def _same(self, earlier: Record, call: Call) -> Record:
        """Return the response of an earlier request if this call repeats it. Raises ApiError."""
        body = self.body(earlier)
        if bytes(body.request) != call.raw:
            raise reused(body.id)
        return earlier

    async def find(self, id_: str, salt: str) -> Record | None:
        """Return a response; None if its owner, who has this salt, has none with this id."""
        with needing_redis():
            return await self.store.read(key(id_, salt))

    def shown(self, record: Record) -> Members:
        """Return the response object of a response.

        Raises:
            ApiError: it cannot be read.
        """
        response = members(self.body(record).response)
        shown: dict[str, Any] = {"status": record.head.status}
        if record.head.status == "failed" and bytes(response.get("error", NULL)) == NULL:
            shown["error"] = {"code": "server_error", "message": GIVEN_UP}
        return response | {name: msgspec.Raw(encode(value)) for name, value in shown.items()}

    def body(self, record: Record) -> BackgroundBody:
        """Return what a response is made of. Raises ApiError if it cannot be read."""
        try:
            return record.body(self.store.max_part_bytes)
        except (*DECODE_ERRORS, TooLongError):
            raise ApiError(404, "the response cannot be read", code="not_found") from None

    async def cancel(self, record: Record) -> Record:
        """Cancel a response that has not ended, and return it as it is then."""
        while record.head.is_open:
            head = replace(record.head, status="cancelled", router="", beats=record.head.beats + 1)
            with needing_redis():
                changed = await self.store.replace(record, head)
                if changed is not None:
                    self.ended["cancelled"] += 1
                    return changed
                found = await self.store.read(record.key)
            if found is None:
                raise ApiError(404, "the response was deleted meanwhile", code="not_found")
            record = found
        return record

    async def delete(self, id_: str, salt: str) -> bool:
        """Delete a response, which also cancels it; return whether there was one."""
        with needing_redis():
            return await self.store.delete(key(id_, salt))

    async def stream(self, record: Record, number: int) -> AsyncIterator[bytes]:
        """Yield the events of a response with a higher number than this, until the response ends.

        Raises:
            ApiError: the response was lost or deleted.
            RedisError, OSError: Redis cannot be used; the client can ask for the rest later.
        """
        if number < len(QUEUED_EVENTS) - 1:
            body = self.body(record)
            request = msgspec.json.decode(body.request, type=dict[str, Any])
            response = queued(body.id, body.created_at, request)
            for place, kind in enumerate(QUEUED_EVENTS):
                if place > number:
                    yield event_of(kind, response, place)
        head, chunk, events = record.head, 0, b""
        while True:
            while chunk < head.chunks:
                read = partial(self.store.events, record.key, chunk)
                events = _there(await self._events.result((record.key, chunk), read))
                for event in after(events, number):
                    yield event
                chunk += 1
            if not head.is_open:
                break
            later = partial(self._later, record.key)
            head = _there(await self._heads.result(record.key, later))
        if head.status not in ("cancelled", "failed") or FAILED in events or number >= head.events:
            return
        # No run has written the end: a client has cancelled it, or routers have given it up.
        ended = _there(await self.store.read(record.key))
        yield event_of(f"response.{head.status}", self.shown(ended), head.events)

    async def _later(self, found: bytes) -> Head | None:
        """Return the state of a response after a pause."""
        await asyncio.sleep(POLL_S)
        return await self.store.head(found)

    async def _watch(self) -> None:
        """Run the responses that nobody runs, until cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self._look()
            except REDIS_ERRORS:
                self._seen.clear()  # without Redis, the other routers cannot show that they run

    async def _look(self) -> None:
        """Look at each response once, and run those whose routers do not."""
        open_ = await self.store.open()
        self._seen = {found: seen for found, seen in self._seen.items() if found in open_}
        for found in open_.keys() - self._runs.keys():
            head = await self.store.head(found)
            if head is None or not head.is_open:
                await self.store.forget(found)
            elif self._is_abandoned(found, head):
                record = await self.store.read(found)
                if record is not None and record.head == head:
                    await self._claim(record)

    def _is_abandoned(self, found: bytes, head: Head) -> bool:
        state, since_s = self._seen.get(found, (None, 0.0))
        if state != head:
            self._seen[found] = head, (since_s := time.monotonic())
        return not head.router or time.monotonic() - since_s > LEASE_S

    async def _claim(self, record: Record) -> None:
        """Run a response if no other router begins to."""
        try:
            body = record.body(self.store.max_part_bytes)
        except (*DECODE_ERRORS, TooLongError):
            await self.store.forget(record.key)
            return
        head = record.head
        is_last = head.attempts >= MAX_ATTEMPTS
        changed = replace(
            head,
            status="failed" if is_last else "queued",
            router=self._router_id,
            beats=head.beats + 1,
            attempts=head.attempts + 1,
        )
        claimed = await self.store.replace(record, changed)
        if claimed is not None and not is_last:
            self._run(claimed, body)

    def _run(self, record: Record, body: BackgroundBody) -> None:
        run = BackgroundRun(self, record, body)
        task = asyncio.create_task(self._ran(run))
        self._runs[record.key] = run, task
        task.add_done_callback(partial(self._forget, record.key))

    def _forget(self, found: bytes, task: asyncio.Task[None]) -> None:
        if self._runs.get(found, (None, None))[1] is task:
            del self._runs[found]
        if not task.cancelled() and (error := task.exception()):
            log.error("a background response has ended with an error", exc_info=error)

    async def _ran(self, run: BackgroundRun) -> None:
        if (status := await run.run()) is not None:
            self.ended[status] += 1

    def caller(self, body: BackgroundBody) -> Caller | None:
        """Return the sender of a request; None: its tenant may send no requests any more."""
        return self._gate.sender(body.tenant, body.priority)


def background_responses(base: RouterBase) -> BackgroundResponses | None:
    """Return the service of a router; None if the cluster does not store responses."""
    options = base.settings.of(BackgroundResponses.name, ResponseOptions)
    if not options.response_store_mb:
        return None
    store = BackgroundStore.opened(base, options, connect(base.settings.redis_url))
    return BackgroundResponses(base.router_id, store, base.gate)


def _there(found: T | None) -> T:
    """Return what was found of a response; raise ApiError if it is not in Redis any more."""
    if found is None:
        raise ApiError(
            404,
            "the response or some of its events are not in Redis any more: the response was "
            "deleted or evicted, or Redis has lost its data; send the request again",
            code="not_found",
        )
    return found


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a request that are sent with it again: those that a router reads.

    Others may have credentials of a proxy.
    """
    return {name: headers[name] for name in KEPT_HEADERS if name in headers}


class SharedReads(Generic[Result]):
    """The reads that run now, by name. A client that needs a value waits for a running read of it.

    Each read ends by itself, since each call to Redis has a time limit.
    """

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Future[Result]] = {}

    async def result(self, name: Hashable, read: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of the read with this name, which begins now unless it runs already.

        If the caller is cancelled, the read goes on, since others may wait for it.

        Raises:
            Exception: the read has failed.
        """
        running = self._running.get(name)
        if running is None or running.done():  # an ended one stays until its callback runs
            running = self._running[name] = asyncio.ensure_future(read())
            running.add_done_callback(partial(self._forget, name))
        return await asyncio.shield(running)

    def _forget(self, name: Hashable, ended: "asyncio.Future[Result]") -> None:
        if self._running.get(name) is ended:
            del self._running[name]
        if not ended.cancelled():
            ended.exception()  # its readers get it; if all have left, nobody needs it
