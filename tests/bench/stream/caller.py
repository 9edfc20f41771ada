"""A client that sends the next request as soon as it has an answer."""

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from typing import cast

import httptools

HOST = "127.0.0.1"
CONTENT = re.compile(rb'"content":\s*"([^"]*)"')


@dataclass
class Tally:
    """The counts of all connections together. A token is one word."""

    tokens: int = 0
    events: int = 0  # number of events with text; an event may have several tokens
    answers: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # times between two events of a stream


class Caller(asyncio.Protocol):
    """A client with one connection.

    `first` is the number of tokens of its first answer. It differs between clients, so that their
    streams do not end at the same time. `failed` receives the error if something fails.
    """

    def __init__(
        self,
        port: int,
        model: str,
        *,
        tokens: int,
        first: int,
        streamed: bool,
        failed: asyncio.Future[None],
    ) -> None:
        self.tally = Tally()
        self._port = port
        self._model = model
        self._tokens = tokens
        self._asked = first
        self._streamed = streamed
        self._failed = failed
        self._again: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._before_s = 0.0  # time of the request, or of the last event
        self._got = 0  # number of tokens received
        self._rest = b""  # the beginning of an incomplete event

    async def connect(self) -> None:
        self._again = None
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, HOST, self._port)
        except OSError as error:
            self._fail(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport = cast(asyncio.Transport, transport)
        self._ask(self._tokens if self._got else self._asked)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error.__context__ or error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._got < self._asked:
            self._fail(exc or ConnectionError("the server has closed a connection"))
        else:
            self._again = asyncio.create_task(self.connect())

    def on_body(self, body: bytes) -> None:
        *events, self._rest = (self._rest + body).split(b"\n\n")
        self._take(events)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self._take([self._rest])
        if status != 200 or self._got != self._asked:
            end = self._rest.decode(errors="replace")
            raise RuntimeError(f"status {status}, {self._got} tokens of {self._asked}: {end}")
        self.tally.answers += 1
        if self._parser.should_keep_alive():
            self._ask(self._tokens)

    def close(self) -> None:
        """Close the connection, even during an answer."""
        if self._transport:
            self._transport.abort()

    def _ask(self, tokens: int) -> None:
        self._asked, self._got, self._rest = tokens, 0, b""
        self._before_s = time.perf_counter()
        assert self._transport
        self._transport.write(request(self._model, self._asked, self._streamed))

    def _take(self, events: list[bytes]) -> None:
        token_counts = (len(text[1].split()) for event in events if (text := CONTENT.search(event)))
        for tokens in filter(None, token_counts):
            now_s = time.perf_counter()
            times_s = self.tally.gaps_s if self._got else self.tally.ttft_s
            times_s.append(now_s - self._before_s)
            self._before_s = now_s
            self._got += tokens
            self.tally.tokens += tokens
            self.tally.events += 1

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)


def request(model: str, tokens: int, streamed: bool) -> bytes:
    """Return a chat request. Its prompt contains the time, so that it is new."""
    message = {"role": "user", "content": f"It is {time.time_ns()}. What can I do?"}
    body = {"model": model, "messages": [message], "max_tokens": tokens}
    payload = json.dumps(body | {"stream": streamed, "ignore_eos": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
    return f"{head}\r\ncontent-length: {len(payload)}\r\n\r\n".encode() + payload
