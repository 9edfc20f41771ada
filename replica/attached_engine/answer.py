"""Turns a server's HTTP response into the chunks of an answer."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from kvroute.contract.generation import Chunk, Emit
from kvroute.contract.http_call import HttpPart
from kvroute.replica.attached_engine.server_bodies import (
    ServerUsage,
    token_count,
    usage_of_body,
    usage_of_event,
)
from kvroute.wire.framing import LARGEST_MESSAGE

EVENT_END = b"\n\n"
EVENT_STREAM = "text/event-stream"
# Maximum size in bytes of an event, and of a response that is not streamed. A message that is
# larger than the wire allows would end the connection to the router, with all its streams.
MAX_PIECE = LARGEST_MESSAGE // 2
UNKNOWN_TOKEN = 0  # stands for each token of the answer, since a server sends text only


@dataclass
class ServerAnswer:
    """The chunks of one response.

    No other replica can continue the answer, because the ids of its tokens are unknown.
    """

    path: str
    emit: Emit
    prompt_tokens: int  # tokens of the prompt
    expected_tokens: int  # prompt tokens that the server probably has cached
    status: int = 0
    content_type: str = ""
    output_tokens: int = 0  # tokens of the answer so far
    # What the server has reported so far.
    usage: ServerUsage = field(default_factory=ServerUsage)
    has_emitted: bool = False

    async def read(self, data: AsyncIterator[bytes]) -> None:
        """Emit everything that the server sends.

        Raises:
            RuntimeError: an event or the whole response is too large.
        """
        if self.content_type.startswith(EVENT_STREAM):
            await self._read_events(data)
            return
        whole = bytearray()
        async for part in data:
            whole += part
            _check_size(whole)
        self.usage = usage_of_body(bytes(whole))
        self._emit(bytes(whole), self.usage.output_tokens or 0, is_last=True, is_whole=True)

    async def _read_events(self, data: AsyncIterator[bytes]) -> None:
        rest = bytearray()  # the beginning of an event
        async for part in data:
            searched = max(0, len(rest) - len(EVENT_END) + 1)
            rest += part
            if (end := rest.rfind(EVENT_END, searched)) >= 0:
                whole = bytes(rest[: end + len(EVENT_END)])
                del rest[: len(whole)]
                self._emit_events([event + EVENT_END for event in whole.split(EVENT_END)[:-1]])
            _check_size(rest)
        if rest:
            self._emit_events([bytes(rest)])
        missing = max(0, (self.usage.output_tokens or 0) - self.output_tokens)
        self._emit(b"", missing, is_last=True)

    def _emit_events(self, events: list[bytes]) -> None:
        for event in events:
            self.usage = self.usage.updated(usage_of_event(event))
        tokens = sum(token_count(self.path, event) for event in events)
        self._emit(b"".join(events), tokens)

    def _emit(
        self, data: bytes, tokens: int, *, is_last: bool = False, is_whole: bool = False
    ) -> None:
        cached_tokens = self.expected_tokens
        if self.usage.cached_tokens is not None and not self.has_emitted:
            cached_tokens = min(self.usage.cached_tokens, self.prompt_tokens)
            self.expected_tokens = cached_tokens
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


def _check_size(data: bytearray) -> None:
    if len(data) > MAX_PIECE:
        raise RuntimeError(
            f"the attached server has sent more than {MAX_PIECE:,} bytes, and neither an event nor "
            "its response has ended"
        )
