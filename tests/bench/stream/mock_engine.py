"""An OpenAI-compatible server without a model. In each step, all streams get their next token.

It says of itself what a vLLM server does. It has no prefix cache, unless it has ports for events.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, cast

import httptools
import uvloop
from tokenizers import Tokenizer

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from tests.bench.stream.mock_cache import BLOCK_SIZE, BLOCKS, MockCache
from tests.support.kv_publisher import Publisher

HOST = "127.0.0.1"
NICENESS = 15  # niceness of the process, as of Ray's workers
WORD = " word"
ID = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "created": 1_700_000_000, "model": "m"}
NOTHING: Mapping[str, Any] = MappingProxyType({})
# A conversation of one message, in the template of the built-in model.
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
# What vLLM's /metrics has of an engine, among hundreds of other lines.
METRICS = (
    f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",enable_prefix_caching="CACHING",'
    f'num_gpu_blocks="{BLOCKS}",engine="0"}} 1.0\n'
    'vllm:num_requests_running{engine="0"} 0.0\n'
    'vllm:num_requests_waiting{engine="0"} 0.0\n'
    'vllm:kv_cache_usage_perc{engine="0"} 0.0\n'
) + "".join(
    f'vllm:e2e_request_latency_seconds_bucket{{engine="0",le="{bound}",model_name="m"}} 0.0\n'
    for bound in range(700)
)
USAGE = {"prompt_tokens": 50, "completion_tokens": 1, "total_tokens": 51}
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def serve(port: int, step_s: float, events: tuple[int, int] | None = None) -> None:
    """Serve until the process is killed.

    Args:
        port: The port of the HTTP server.
        step_s: Seconds of a step.
        events: The ports for KV cache events and their replays; None: there is no prefix cache.
    """
    os.nice(NICENESS)
    uvloop.run(_serve(port, step_s, events))


async def _serve(port: int, step_s: float, events: tuple[int, int] | None) -> None:
    publisher = Publisher(events) if events else None
    steps = Steps(step_s, MockCache(publisher) if publisher else None)
    own = pages(events)
    await asyncio.get_running_loop().create_server(lambda: Connection(steps, own), HOST, port)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(steps.run())
        if publisher:
            tasks.create_task(publisher.serve())


class Steps:
    """Runs steps while a connection waits for tokens."""

    def __init__(self, step_s: float, cache: MockCache | None) -> None:
        self.cache = cache
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
            if self.cache is not None:
                await self.cache.publish()
            self._step()

    def _step(self) -> None:
        for connection, tokens in [*self.waiting.items()]:
            if tokens > 1:
                self.waiting[connection] = tokens - 1
                connection.send_token()
            else:
                del self.waiting[connection]
                connection.finish()


class Connection(asyncio.Protocol):
    def __init__(self, steps: Steps, own_pages: Mapping[bytes, bytes]) -> None:
        self._steps = steps
        self._pages = own_pages
        self._parser = httptools.HttpRequestParser(self)
        self._url = self._body = self._id = b""
        self._streamed = False
        self._token, self._end = TOKEN, END

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._steps.waiting.pop(self, None)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"PRI "):
            self._transport.close()  # HTTP/2, which the gateway tries first
        else:
            self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._id = value

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        if body:
            self._answer(json.loads(body))
        else:
            self.write(self._pages.get(self._url, HEALTH))  # gateways ask for health and metadata

    def _answer(self, request: dict[str, Any]) -> None:
        if self._steps.cache is not None:
            self._steps.cache.add(prompt_ids(request))
        self._streamed = request["stream"]
        if self._streamed:
            self.write(STREAM_HEAD)
            if request.get("return_token_ids"):
                self._use_ids(request)
        # SGLang's gateway sends the first of these fields, and our clients send the second.
        tokens = request.get("max_completion_tokens") or request["max_tokens"]
        self._steps.waiting[self] = tokens
        self._steps.has_work.set()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def finish(self) -> None:
        """Send the end of an answer, together with its last token."""
        self.write(self._end if self._streamed else ANSWER)

    def send_token(self) -> None:
        self.write(self._token)

    def _use_ids(self, request: dict[str, Any]) -> None:
        """Send the events as vLLM does for a request that asks for token ids."""
        prompt = prompt_ids(request)
        own: dict[str, Any] = {"id": f"chatcmpl-{self._id.decode()}"}
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        first = own | {"choices": [role], "prompt_token_ids": prompt}
        self.write(event(json.dumps(ID | first, separators=(",", ":"))))
        self._token = token(None, own, token_ids=[7])
        self._end = token("length", own, token_ids=[7]) + LAST


def whole(document: dict[str, Any]) -> bytes:
    return page(json.dumps(document), "application/json")


def page(text: str, content_type: str) -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def event(data: str) -> bytes:
    """Return an event as an HTTP chunk."""
    text = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(text), text)


def token(finish_reason: str | None, own: Mapping[str, Any] = NOTHING, **more: Any) -> bytes:
    delta = {"content": WORD}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, **more}
    document = {**ID, **own} | {"object": "chat.completion.chunk", "choices": [choice]}
    return event(json.dumps(document, separators=(",", ":")))


TOKEN = token(None)
LAST = event("[DONE]") + b"0\r\n\r\n"
END = token("length") + LAST
HEALTH = whole({"status": "ok"})


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(f"{resolve(BUILTIN_MODEL)}/tokenizer.json")


def prompt_ids(request: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a conversation of one message."""
    text = CHAT.format(request["messages"][0]["content"])
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def pages(events: tuple[int, int] | None) -> Mapping[bytes, bytes]:
    """Return what the server says of itself, by path."""
    sources = {}
    if events:
        endpoint, replay = (f"tcp://{HOST}:{port}" for port in events)
        sources["0"] = {"endpoint": endpoint, "replay_endpoint": replay}
    model = {"id": ID["model"], "root": resolve(BUILTIN_MODEL), "max_model_len": 4096}
    return {
        b"/v1/models": whole({"data": [model]}),
        b"/metrics": page(METRICS.replace("CACHING", str(bool(events))), "text/plain"),
        b"/kv_event_sources": whole(sources),
        b"/version": whole({"version": "0.32.0"}),
    }


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
