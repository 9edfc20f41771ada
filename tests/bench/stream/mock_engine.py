"""An OpenAI-compatible server without a model. In each step, all streams get their next token."""

import asyncio
import json
import os
from typing import Any, cast

import httptools
import uvloop

HOST = "127.0.0.1"
NICENESS = 15  # niceness of the process, as of Ray's workers
WORD = " word"
ID = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "created": 1_700_000_000, "model": "m"}
USAGE = {"prompt_tokens": 50, "completion_tokens": 1, "total_tokens": 51}
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def serve(port: int, step_s: float) -> None:
    """Serve until the process is killed."""
    os.nice(NICENESS)
    uvloop.run(_serve(port, step_s))


async def _serve(port: int, step_s: float) -> None:
    steps = Steps(step_s)
    await asyncio.get_running_loop().create_server(lambda: Connection(steps), HOST, port)
    await steps.run()


class Steps:
    """Runs steps while a connection waits for tokens."""

    def __init__(self, step_s: float) -> None:
        self.waiting: dict[Connection, int] = {}  # connection -> remaining tokens
        self.has_work = asyncio.Event()
        self._step_s = step_s

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        ends_s = loop.time()
        while True:
            if not self.waiting:
                self.has_work.clear()
                await self.has_work.wait()
                ends_s = loop.time()
            ends_s = max(ends_s + self._step_s, loop.time())
            await asyncio.sleep(ends_s - loop.time())
            self._step()

    def _step(self) -> None:
        for connection, tokens in [*self.waiting.items()]:
            if tokens > 1:
                self.waiting[connection] = tokens - 1
                connection.write(TOKEN)
            else:
                del self.waiting[connection]
                connection.finish()


class Connection(asyncio.Protocol):
    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._streamed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._steps.waiting.pop(self, None)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"PRI "):
            self._transport.close()  # HTTP/2, which the gateway tries first
        else:
            self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        if body:
            self._answer(json.loads(body))
        else:
            self.write(whole({"status": "ok"}))  # the gateway asks for health and metadata

    def _answer(self, request: dict[str, Any]) -> None:
        self._streamed = request["stream"]
        if self._streamed:
            self.write(STREAM_HEAD)
        # The gateway sends the first of these fields, and our clients send the second.
        tokens = request.get("max_completion_tokens") or request["max_tokens"]
        self._steps.waiting[self] = tokens
        self._steps.has_work.set()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def finish(self) -> None:
        """Send the end of an answer, together with its last token."""
        self.write(END if self._streamed else ANSWER)


def whole(document: dict[str, Any]) -> bytes:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def event(data: str) -> bytes:
    """Return an event as an HTTP chunk."""
    text = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(text), text)


def token(finish_reason: str | None) -> bytes:
    delta = {"content": WORD}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    document = ID | {"object": "chat.completion.chunk", "choices": [choice]}
    return event(json.dumps(document, separators=(",", ":")))


TOKEN = token(None)
END = token("length") + event("[DONE]") + b"0\r\n\r\n"
ANSWER = whole(
    ID
    | {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": WORD},
                "finish_reason": "length",
            }
        ],
        "usage": USAGE,
    }
)
