"""What a replica's API side costs by route and kind of body, beside vLLM's own application.

Both run on one engine with a shallow model in this process, without sockets. The engine's client is
in all figures, the engine itself in none: it is another process.
"""

import asyncio
import itertools
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvroute.contract.generation import GenerateRequest, TokenIds
from kvroute.contract.http_call import HttpCall
from tests.bench.report import Row, Section
from tests.support.bodies import ASK, CHATS, COMPLETIONS, MESSAGES, RESPONSES, TOOL
from tests.support.engines import TOOL_PARSER, Running, shallow_model, started

STREAMS = 8
TOKENS = 200
ROUNDS = 4  # each way in turn; the median counts
CHAT = {"messages": ASK, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, streamed": (CHATS, CHAT),
    "chat with tools, streamed": (CHATS, CHAT | {"tools": [TOOL]}),
    "chat with logprobs, streamed": (CHATS, CHAT | {"logprobs": True, "top_logprobs": 2}),
    "chat, whole": (CHATS, CHAT | {"stream": False}),
    "completion, streamed": (
        COMPLETIONS,
        {"prompt": "Once", "max_tokens": TOKENS, "ignore_eos": True, "stream": True},
    ),
    "response, streamed": (
        RESPONSES,
        {"input": ASK, "max_output_tokens": TOKENS, "temperature": 0, "stream": True},
    ),
    "message, streamed": (
        MESSAGES,
        {"messages": ASK, "max_tokens": TOKENS, "temperature": 0, "stream": True},
    ),
    "chat of one token, whole": (CHATS, CHAT | {"stream": False, "max_tokens": 1}),
}
WAYS = ("kvroute", "vLLM's application", "the engine's client alone")

Ask = Callable[[], Awaitable[int]]  # returns how many tokens came


def applications() -> Section:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own
        rows = asyncio.run(_rows())
    return Section(
        f"A replica's API side, {STREAMS} at a time: CPU us a token",
        rows,
        ["vLLM's server also writes to sockets, which is in none of these figures."],
    )


async def _rows() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        own: dict[str, Any] = {"kv_cache_memory_mb": 32}
        own["engine_args"] = {"tool_call_parser": TOOL_PARSER}
        model = str(shallow_model(Path(folder) / "model"))
        async with started("vllm", model=model, **own) as running:
            from tests.support.stock import stock_app

            engine: Any = running.engine
            stock = await stock_app(engine._llm, tool_call_parser=TOOL_PARSER)
            return [await _row(running, stock, *kind) for kind in KINDS.items()]


async def _row(running: Running, stock: Any, name: str, kind: tuple[str, dict[str, Any]]) -> Row:
    path, body = kind
    raw = json.dumps({"model": "m", **body}).encode()
    rendered = await running.engine.render(HttpCall(path, raw, 1.0, is_rendered=False))
    ids = np.frombuffer(rendered.token_ids, "<u4")
    most = body.get("max_tokens", TOKENS)
    asks: dict[str, Ask] = {
        WAYS[0]: partial(_ours, running, ids, HttpCall(path, raw, 1.0)),
        WAYS[1]: partial(_stock, stock, path, raw),
        WAYS[2]: partial(_alone, running, ids, most),
    }
    tokens = await asks[WAYS[0]]()  # also warms up
    spent: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, ask in asks.items():
            before_s = time.process_time()
            await asyncio.gather(*(ask() for _ in range(STREAMS)))
            spent[way].append(1e6 * (time.process_time() - before_s) / (STREAMS * tokens))
    median = {way: statistics.median(each) for way, each in spent.items()}
    return {"kind": name, "tokens": tokens, **median, "ratio": median[WAYS[0]] / median[WAYS[1]]}


_numbers = itertools.count()


async def _ours(running: Running, ids: TokenIds, call: HttpCall) -> int:
    return await _tokens(running, GenerateRequest(f"a-{next(_numbers)}", ids, call=call))


async def _alone(running: Running, ids: TokenIds, tokens: int) -> int:
    request = GenerateRequest(f"b-{next(_numbers)}", ids, max_tokens=tokens)
    return await _tokens(running, request)


async def _tokens(running: Running, request: GenerateRequest) -> int:
    async with aclosing(running.engine.generate(request)) as chunks:
        return sum([len(chunk.token_ids) async for chunk in chunks])


async def _stock(app: Any, path: str, raw: bytes) -> int:
    from tests.support.stock import stock_answer

    await stock_answer(app, path, raw, request_id=f"c-{next(_numbers)}")
    return 0


if __name__ == "__main__":
    print(applications().markdown())
