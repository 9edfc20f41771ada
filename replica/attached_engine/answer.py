"""Turns a server's HTTP response into the chunks of an answer."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from kvroute.contract.generation import Chunk, Emit
from kvroute.contract.http_call import HttpPart
from kvroute.replica.attached_engine.resumption.token_events import EventReader, ReadEvent
from kvroute.replica.attached_engine.server_bodies import (
    ServerUsage,
    token_count,
    usage_of_body,
    usage_of_event,
)
from kvroute.replica.attached_engine.server_client import ServerLostError
from kvroute.wire.framing import LARGEST_MESSAGE

EVENT_END = b"\n\n"
EVENT_STREAM = "text/event-stream"
# Maximum size in bytes of an event, and of a response that is not streamed. A message that is
# larger than the wire allows would end the connection to the router, with all its streams.
MAX_PIECE = LARGEST_MESSAGE // 2
UNKNOWN_TOKEN = 0  # stands for each token of the answer, if a server sends text only


@dataclass
class ServerAnswer:
    """The chunks of one response.

    Another server can continue the answer only if `reader` knows the ids of its tokens.
    """

    path: str
    emit: Emit
    prompt_tokens: int  # tokens of the prompt
    expected_tokens: int  # prompt tokens that the server probably has cached
    status: int = 0
    content_type: str = ""
    reader: EventReader | None = None  # None: the server was not asked for token ids
    # Returns whether the server is lost. It is asked if an answer has ended with an error.
    is_lost: Callable[[], Awaitable[bool]] | None = None
    output_tokens: int = 0  # tokens of the answer so far
    # What the server has reported so far.
    usage: ServerUsage = field(default_factory=ServerUsage)
    has_emitted: bool = False
    # Events that wait for the next event with tokens, or for the end of the response.
    held: list[ReadEvent] = field(default_factory=list)

    async def read(self, data: AsyncIterator[bytes]) -> None:
        """Emit everything that the server sends.

        Raises:
            RuntimeError: an event or the whole response is too large.
            ServerLostError: the server is lost, also if it has ended the answer with an error.
        """
        if self.content_type.startswith(EVENT_STREAM):
            await self._read_events(data)
            return
        whole = bytearray()
        async for part in data:
            whole += part
            _check_size(len(whole))
        self.usage = usage_of_body(bytes(whole))
        tokens = _unknown(self.usage.output_tokens or 0)
        self._emit([ReadEvent(bytes(whole), tokens)], can_continue=False, is_last=True)

    async def _read_events(self, data: AsyncIterator[bytes]) -> None:
        rest = bytearray()  # the beginning of an event
        async for part in data:
            searched = max(0, len(rest) - len(EVENT_END) + 1)
            rest += part
            if (end := rest.rfind(EVENT_END, searched)) >= 0:
                whole = bytes(rest[: end + len(EVENT_END)])
                del rest[: len(whole)]
                self._read_whole([event + EVENT_END for event in whole.split(EVENT_END)[:-1]])
                await self._check_server()
                if self.reader and self.reader.is_cut:
                    return
            _check_size(len(rest) + sum(len(event.data) for event in self.held))
        if rest:
            self._read_whole([bytes(rest)])
        known = self.output_tokens + sum(len(event.token_ids or ()) for event in self.held)
        missing = max(0, (self.usage.output_tokens or 0) - known)
        self.held.append(ReadEvent(b"", _unknown(missing)))
        self._emit(self.held, can_continue=self.can_continue, is_last=True)

    @property
    def can_continue(self) -> bool:
        return self.reader is not None and self.reader.can_continue

    async def _check_server(self) -> None:
        """Raise ServerLostError if an answer has ended with an error because the server is lost."""
        if self.can_continue and self.reader and self.reader.has_failed and self.is_lost:
            if await self.is_lost():
                raise ServerLostError("the server has given up the answer, and is away")
            self.is_lost = None

    def _read_whole(self, events: Sequence[bytes]) -> None:
        """Read complete events, and emit those that need not wait."""
        ready = 0
        for event in events:
            read = ReadEvent(event, None) if self.reader is None else self.reader.read(event)
            self.usage = self.usage.updated(usage_of_event(read.data))
            if read.token_ids is None:
                read = read._replace(token_ids=_unknown(token_count(self.path, read.data)))
            self.held.append(read)
            if not read.is_held:
                ready = len(self.held)
            if self.reader and self.reader.is_cut:
                break
        if ready:
            self._emit(self.held[:ready], can_continue=self.can_continue)
            del self.held[:ready]

    def _emit(
        self, events: Sequence[ReadEvent], *, can_continue: bool, is_last: bool = False
    ) -> None:
        cached_tokens = self.expected_tokens
        if self.usage.cached_tokens is not None and not self.has_emitted:
            cached_tokens = min(self.usage.cached_tokens, self.prompt_tokens)
            self.expected_tokens = cached_tokens
        ids = tuple([id_ for event in events for id_ in event.token_ids or ()])
        part = HttpPart(
            b"".join([event.data for event in events]),
            0 if self.has_emitted else self.status,
            "" if self.has_emitted else self.content_type,
            tuple([len(event.token_ids) for event in events if event.token_ids]),
            can_continue=can_continue,
            is_whole=not self.content_type.startswith(EVENT_STREAM),
            created=self.reader.created if self.reader and can_continue else 0,
            text_chars=sum(event.text_chars for event in events),
        )
        self.has_emitted = True
        self.output_tokens += len(ids)
        self.emit(Chunk(ids, cached_tokens, is_last, part))


def _unknown(tokens: int) -> tuple[int, ...]:
    return (UNKNOWN_TOKEN,) * tokens


def _check_size(size: int) -> None:
    if size > MAX_PIECE:
        raise RuntimeError(
            f"the attached server has sent more than {MAX_PIECE:,} bytes, and neither an event nor "
            "its response has ended"
        )
