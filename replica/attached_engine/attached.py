"""The engine of an attached server: knows what the server has cached, and what it does."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from kvroute.blocks.chain import Scope, Space
from kvroute.contract.generation import (
    Emit,
    EngineDeadError,
    GenerateRequest,
)
from kvroute.contract.http_call import HttpCall, Rendered
from kvroute.contract.records import MAX_COUNT, EngineFacts, Load
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.replica.attached_engine.server_cache.cached_blocks import ServerBlocks
from kvroute.replica.attached_engine.server_cache.event_source import EventSource
from kvroute.replica.attached_engine.server_cache.sent_blocks import SentBlocks
from kvroute.replica.attached_engine.server_cache.wire import decode_batch
from kvroute.replica.attached_engine.server_connection import ServerConnection
from kvroute.replica.attached_engine.server_facts import (
    MeasuredCopies,
    OwnerCalls,
    ServerFacts,
    calls_of,
    copies_of,
    host_gigabytes,
    is_asleep,
    load_of,
)
from kvroute.replica.attached_engine.server_requests import ServerRequests
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlocksHeld,
    KVEvent,
    LayoutChanged,
    Transfers,
)
from kvroute.replica.engine.pins import admit_pin
from kvroute.replica.engine.protocol import Engine

log = logging.getLogger("kvroute.attached")

MAX_BLOCKS = 10_000_000  # blocks of a server that are followed: bounds this process's memory
CATCH_UP_S = 5.0  # seconds that a server which is back waits for its KV cache events


class Owned(Protocol):
    """What an engine owns besides its connection."""

    def problem(self) -> str:
        """Return why the engine cannot continue; empty: it can."""
        ...

    async def close(self) -> None: ...


class AttachedEngine(Engine):
    """One data parallel rank of a server that somebody else runs.

    It has no pins and no order of eviction of its own. Another server can continue the streams that
    resumption/plain_stream.py describes.
    """

    def __init__(
        self,
        connection: ServerConnection,
        facts: EngineFacts,
        server: ServerFacts,
        rank: int,
        space: Space,
        *,
        has_usual_limit: bool = False,
    ) -> None:
        """Create an engine.

        Args:
            connection: The server; its owner closes it.
            facts: The engine's facts.
            server: What the server says about itself.
            rank: The number of the data parallel rank.
            space: What all fingerprints of the model share.
            has_usual_limit: Whether the model's own settings limit the tokens of an answer whose
                request does not.
        """
        self.facts = facts
        self._connection = connection
        self._rank = rank
        self._space = space
        self._requests = ServerRequests(
            connection, server, rank, facts.block_size, has_usual_limit=has_usual_limit
        )
        self._adapters = tuple(server.adapters)  # LoRA adapters; the server has loaded all of them
        self._server_blocks = facts.capacity_blocks  # the server's own blocks
        self._cached = ServerBlocks(space)
        self._layout = self._cached.layout  # the layout that was published last
        self.group_entries: Sequence[int | None] = self._cached.groups.group_entries
        self._sent = SentBlocks(facts.capacity_blocks)
        events = server.ranks[rank].events if facts.prefix_caching else None
        self._source = (
            EventSource(events.endpoint, events.replay_endpoint, topic=events.topic)
            if events
            else None
        )
        self._calls: OwnerCalls | None = None  # calls of the server until now; None: unknown
        self._was_cleared = False  # whether events of the last interval have cleared the cache
        self._copies = MeasuredCopies()  # the server's copies from host memory so far
        self._skipped = Counter[str]()  # the server's events of unknown kinds, by kind
        self._events: list[KVEvent] = []
        self._has_events = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._owned: Owned | None = None  # only rank 0 has it

    def start(self) -> None:
        """Start the tasks that watch the server (rank 0 only) and follow its events."""
        if self._rank == 0:
            self._tasks.append(asyncio.create_task(self._connection.watch(), name="watch-server"))
        self._connection.observers.append(self._observe)
        if self._source:
            follow = self._follow(self._source)
            self._tasks.append(asyncio.create_task(follow, name="follow-server"))

    def own(self, owned: Owned) -> None:
        """Check the claim on the server, or the server itself, and close it with the engine."""
        self._owned = owned

    @property
    def pins(self) -> Mapping[str, int]:
        return {}

    @property
    def host_pins(self) -> Mapping[str, int]:
        return {}

    # Requests.

    async def generate(self, request: GenerateRequest, emit: Emit) -> None:
        """Forward the request.

        Raises:
            NotBegunError: Another engine may be able to run the request.
            EngineAwayError: The server does not answer, or has stopped in the middle.
            PinRefusedError: The request has a pin.
            ValueError: The server has refused a prompt without an HTTP request.
        """
        if request.pin:
            admit_pin(request, self)
        is_computed = await self._requests.send(
            request,
            emit,
            expected_tokens=self._expected_tokens(request),
            reports_hits=self._reports_hits(),
        )
        if is_computed:
            self._learn(request)

    async def render(self, call: HttpCall) -> Rendered:
        """Return the prompt that the server would make of the call, as far as it tells."""
        return await self._requests.render(call)

    def _expected_tokens(self, request: GenerateRequest) -> int:
        """Return the prompt tokens that the server has cached, by the table of its blocks."""
        size = self.facts.block_size
        reusable = max(0, len(request.token_ids) - 1) // size
        if not reusable or not self._is_known(request):
            return 0
        return self._blocks.hit_blocks(self._chain(request)[:reusable]) * size

    def _is_known(self, request: GenerateRequest) -> bool:
        """Return whether the token ids are the whole prompt; images, for example, are not ids."""
        return self.facts.prefix_caching and (request.call is None or request.call.is_rendered)

    def _chain(self, request: GenerateRequest) -> Sequence[Any]:
        # A stock server mixes the salt into the first block, so no namespace shares a block.
        scope = Scope(request.variant, request.namespace)
        return self._space.chain(request.token_ids, scope)

    def _learn(self, request: GenerateRequest) -> None:
        """Assume that the server has cached the prompt, if it does not report that itself."""
        if self._source is None and self._is_known(request):
            self._queue(self._sent.sent(self._chain(request)))

    # The cache.

    @property
    def _blocks(self) -> ServerBlocks | SentBlocks:
        """Return the table of the server's blocks: from its events, or guessed."""
        return self._cached if self._source else self._sent

    def _reports_hits(self) -> bool:
        """Return whether requests ask the server to report the blocks of cache hits.

        This is needed where blocks are cached whose events came before this process started.
        """
        return self._source is not None and self._cached.reports_hits

    async def events(self) -> AsyncGenerator[list[KVEvent], None]:
        while True:
            await self._has_events.wait()
            self._has_events.clear()
            batch, self._events = self._events, []
            if batch:
                yield batch

    async def _follow(self, source: EventSource) -> None:
        """Apply the server's events until cancelled."""
        async for payload in source.updates():
            if payload is None:
                self._forget(reports_hits=False)
                continue
            kinds = len(self._skipped)
            try:
                changes = self._cached.apply(decode_batch(payload, self._skipped))
            except DECODE_ERRORS as error:
                log.warning("an event of %s cannot be read: %s", self._connection.url, error)
                self._forget(reports_hits=True)
                continue
            if len(self._skipped) > kinds:
                log.info("events of %s of unknown kinds: %s", self._connection.url, self._skipped)
            self._was_cleared |= AllBlocksCleared() in changes
            self._publish(changes)
            self._cached.reports_hits |= not source.is_complete
            if len(self._cached) > self._server_blocks or self._cached.total > MAX_BLOCKS:
                log.warning("more blocks than %s has are cached, by its events", self.facts)
                self._forget(reports_hits=True)

    def _publish(self, changes: Sequence[KVEvent]) -> None:
        """Publish changes of the table; if events have named further groups, all of the table."""
        if self._cached.layout != self._layout:
            self._layout, groups = self._cached.layout, self._cached.groups
            self.facts = replace(
                self.facts, layout=groups.layout, capacity_blocks=groups.units(self._server_blocks)
            )
            self.group_entries = groups.group_entries
            log.info("the cache of %s has another layout: %s", self._connection.url, self.facts)
            changes = [LayoutChanged(self.facts, self.group_entries), *self._cached.stored()]
        self._queue(changes)

    def _forget(self, *, reports_hits: bool) -> None:
        """Clear the table; with `reports_hits`, cache hits report again what is cached."""
        self._sent.clear()
        self._cached.clear()
        self._cached.reports_hits = reports_hits
        self._publish([AllBlocksCleared()])

    def _queue(self, events: Sequence[KVEvent]) -> None:
        self._events += events
        if self._events:
            self._has_events.set()

    async def emit_held(self) -> None:
        """Add the blocks of the table to the events; a stock server has no list of its own."""
        self._queue([BlocksHeld(self._blocks.held)])

    async def reset_prefix_cache(self) -> bool:
        """Clear the server's cache; only a server in development mode allows that."""
        if not (await self._connection.client.post("/reset_prefix_cache")).is_ok:
            return False
        self._queue(self._sent.clear())
        return True

    async def unpin(self, name: str) -> None: ...

    async def end_session(self, session: int) -> None: ...

    # The server.

    def _observe(self) -> None:
        """Learn from the server's metrics what its events do not tell, or tell too late."""
        self._observe_calls()
        self._observe_copies()

    def _observe_calls(self) -> None:
        """Forget blocks that calls by the server's owner have made useless.

        A server publishes that it was cleared with its next step, which an idle one does not make.
        It does not publish that an adapter got other files. If blocks are forgotten in vain, hits
        report them again.
        """
        samples = self._connection.samples
        calls = calls_of(samples)
        before, self._calls = self._calls or calls, calls
        was_cleared, self._was_cleared = self._was_cleared, False
        was_called = calls.clearing > before.clearing and not was_cleared
        if was_called or (is_asleep(samples) and self._cached.total):
            self._forget(reports_hits=True)
        elif calls.adapters > before.adapters:
            self._cached.reports_hits = True
            dropped = self._cached.drop_adapters() if self._source else self._sent.clear()
            self._publish(dropped)

    def _observe_copies(self) -> None:
        """Publish the host memory when copies from it have been measured, and later copies."""
        copies = copies_of(self._connection.samples, self._rank)
        moved, self._copies = copies - self._copies, copies
        if self._source is None or not self._cached.in_host:
            return
        if self.facts.host is not None:
            moved_bytes = int(min(moved.bytes, MAX_COUNT))
            if moved_bytes:
                tokens = int(min(moved.tokens, MAX_COUNT))
                self._queue([Transfers(tokens, moved_bytes, moved.seconds)])
            return
        gigabytes = host_gigabytes(self._connection.samples, self._rank)
        if not copies.is_stable(moved):
            return
        if host := copies.tier(self.facts.block_size, self._cached.in_host, gigabytes):
            self.facts = replace(self.facts, host=host)
            self._cached.groups.add_host()
            self._publish([])

    def load(self) -> Load:
        load = load_of(self._connection.samples, self._rank, self.facts.capacity_blocks)
        return replace(
            load,
            rendering_differences=self._requests.rendering_differences,
            variants=self._adapters,
        )

    async def check(self) -> None:
        """Raise EngineDeadError if the server is another one now, or if a task has failed."""
        if self._owned and (problem := self._owned.problem()):
            raise EngineDeadError(problem)
        if self._connection.changed:
            raise EngineDeadError(self._connection.changed)
        for task in self._tasks:
            if task.done():
                raise EngineDeadError("the attached server is not watched any more") from (
                    None if task.cancelled() else task.exception()
                )

    async def wait_until_away(self) -> str:
        return await self._connection.wait_until_away()

    async def wait_until_back(self) -> None:
        """Wait until the server answers, and until its cache is known again."""
        await self._connection.wait_until_back()
        if self._source is None:
            self._queue(self._sent.clear())
            return
        self._source.compare()
        try:
            async with asyncio.timeout(CATCH_UP_S):
                await self._source.caught_up()
        except TimeoutError:
            log.warning("%s sends no KV cache events", self._connection.url)
            self._forget(reports_hits=True)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._source:
            self._source.close()
        if self._owned:
            await self._owned.close()
        if self._rank == 0:
            await self._connection.close()
