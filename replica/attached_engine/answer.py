"""Turns a server's HTTP response into the chunks of an answer."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvroute.contract.generation import Chunk, Emit
from kvroute.contract.http_call import HttpPart
from kvroute.replica.attached_engine.bodies import (
    Usage,
    token_count,
    usage_of_body,
    usage_of_event,
)

EVENT_END = b"\n\n"
EVENT_STREAM = "text/event-stream"
UNKNOWN_TOKEN = 0  # stands for each token of the answer, since a server sends text only


@dataclass
class Answer:
    """The chunks of one response.

    No other replica can continue the answer, because the ids of its tokens are unknown.
    """

    path: str
    emit: Emit
    expected_tokens: int  # prompt tokens that the server probably has cached
    status: int = 0
    content_type: str = ""
    output_tokens: int = 0  # tokens of the answer so far
    usage: Usage | None = None  # the latest report of the server
    has_emitted: bool = False

    async def read(self, data: AsyncIterator[bytes]) -> None:
        """Emit everything that the server sends."""
        if self.content_type.startswith(EVENT_STREAM):
            await self._read_events(data)
            return
        whole = b"".join([part async for part in data])
        self.usage = usage_of_body(whole)
        tokens = self.usage.output_tokens if self.usage else 0
        self._emit(whole, tokens, is_last=True, is_whole=True)

    async def _read_events(self, data: AsyncIterator[bytes]) -> None:
        rest = b""
        async for part in data:
            *events, rest = (rest + part).split(EVENT_END)
            if events:
                self._emit_events([event + EVENT_END for event in events])
        if rest:
            self._emit_events([rest])
        missing = self.usage.output_tokens - self.output_tokens if self.usage else 0
        self._emit(b"", max(0, missing), is_last=True)

    def _emit_events(self, events: list[bytes]) -> None:
        for event in events:
            self.usage = usage_of_event(event) or self.usage
        tokens = sum(token_count(self.path, event) for event in events)
        self._emit(b"".join(events), tokens)

    def _emit(
        self, data: bytes, tokens: int, *, is_last: bool = False, is_whole: bool = False
    ) -> None:
        cached_tokens = self.expected_tokens
        if self.usage and self.usage.cached_tokens is not None and not self.has_emitted:
            cached_tokens = self.expected_tokens = self.usage.cached_tokens
        part = HttpPart(
            data,
            0 if self.has_emitted else self.status,
            "" if self.has_emitted else self.content_type,
            (tokens,) if tokens else (),
            can_continue=False,
            is_whole=is_whole,
        )
        self.has_emitted = True
        self.output_tokens += tokens
        self.emit(Chunk((UNKNOWN_TOKEN,) * tokens, cached_tokens, is_last, part))
