"""Responses to completion calls with several prompts.

The prompts are placed independently, and the client gets one response. With n choices for each
prompt, choice c of prompt p has the index p * n + c in this response.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from fastapi import Response
from fastapi.responses import StreamingResponse
from msgspec import Raw
from starlette.types import Receive, Scope, Send

from kvroute.router.api.errors import DONE, EVENTS, JSON, ApiError
from kvroute.router.api.fair_lock import one_by_one, run_all
from kvroute.router.api.response_object import Members, members
from kvroute.router.dispatch.generation import Generation, close_all
from kvroute.router.dispatch.relay import Answer, Ending, Failed, Refused
from kvroute.router.placement.receipts import RECEIPTS

EVENT = b"data: "  # beginning of a server-sent event
# Number of items of all prompts' streams that are buffered. While the buffer is full, the streams
# are not read, and join the items that wait in them.
WAITING_ITEMS = 64
CHOICES = "choices"  # the field of a response that has the choices of its prompts

Item = TypeVar("Item")

encode = msgspec.json.encode
decode = msgspec.json.decode


async def batch_response(
    generations: Sequence[Generation],
    headers: Mapping[str, str],
    *,
    n: int,
    ending: Ending,
    failed: Failed,
    refused: Refused,
) -> Response:
    """Return the response to a call with several prompts.

    Args:
        headers: headers to add to the response.
        n: number of choices for each prompt.
        ending: changes the last bytes of the response.
        failed: makes the last event of a stream that ends with an error.
        refused: makes the body of an error.

    Raises:
        ApiError: no replica can continue the response to one of the prompts.
    """
    answers = [Answer(generation) for generation in generations]
    is_streamed = False
    try:
        await run_all(answer.wait_for_status() for answer in answers)
        for answer in answers:
            if answer.status != 200:  # the calls differ only in their prompts: one error is enough
                refusal = refused(await answer.read_all(), answer.status)
                return Response(refusal, answer.status, headers, media_type=JSON)
        is_streamed = answers[0].is_stream
        if is_streamed:
            return _BatchEvents(answers, headers, n=n, ending=ending, failed=failed)
        bodies = await run_all(answer.read_all() for answer in answers)
    finally:
        if not is_streamed:
            await close_all(generations)
    body = encode(await merge_bodies(bodies, n=n))
    return Response(await ending(body), headers=headers, media_type=JSON)


async def merge_bodies(bodies: Sequence[bytes], *, n: int) -> Members:
    """Merge the response bodies of all prompts into one.

    Its members are those of the first body, except for the choices, the usage and the receipts.

    Args:
        n: number of choices for each prompt.
    """
    merged, usage = members(bodies[0]), None
    lists: dict[str, list[Raw]] = {name: [] for name in (CHOICES, RECEIPTS) if name in merged}
    async for prompt, raw in one_by_one(enumerate(bodies)):
        body = members(raw)
        for name, items in lists.items():
            own = decode(body[name], type=list[Raw])
            items += [_shifted(item, prompt * n) for item in own] if name == CHOICES else own
        usage = _sum(usage, decode(body.get("usage", b"null")))
    for name, items in lists.items():
        merged[name] = Raw(b"[" + b",".join(items) + b"]")
    return {**merged, "usage": Raw(encode(usage))}


class MergedStreams(Generic[Item]):
    """The items of several streams, in the order in which they arrive.

    When a stream fails, `next` raises its error.

    Args:
        streams: each of these functions returns the next item of a stream, or None after the last
            item.
    """

    def __init__(self, streams: Sequence[Callable[[], Awaitable[Item | None]]]) -> None:
        self._streams = streams
        self._queue: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(
            WAITING_ITEMS
        )
        self._tasks: list[asyncio.Task[None]] | None = None  # None: no item was requested yet
        self._unfinished = len(streams)

    async def next(self) -> tuple[int, Item] | None:
        """Return the index of a stream and its next item; None when all streams have ended.

        Raises:
            Exception: a stream has raised it.
        """
        if len(self._streams) == 1:
            item = await self._streams[0]()
            return None if item is None else (0, item)
        if self._tasks is None:
            self._tasks = [
                asyncio.create_task(self._drain(index, stream))
                for index, stream in enumerate(self._streams)
            ]
        while self._unfinished:
            queued = await self._queue.get()
            if isinstance(queued, Exception):
                raise queued
            if queued is not None:
                return queued
            self._unfinished -= 1
        return None

    async def close(self) -> None:
        """Stop reading the streams."""
        for task in self._tasks or ():
            task.cancel()
        await asyncio.gather(*(self._tasks or ()), return_exceptions=True)

    async def _drain(self, index: int, stream: Callable[[], Awaitable[Item | None]]) -> None:
        try:
            while (item := await stream()) is not None:
                await self._queue.put((index, item))
        except Exception as error:  # any error; `next` raises it
            await self._queue.put(error)
            return
        await self._queue.put(None)


class _BatchEvents(StreamingResponse):
    """A stream of the events of all prompts, in the order of their arrival."""

    def __init__(
        self,
        answers: Sequence[Answer],
        headers: Mapping[str, str],
        *,
        n: int,
        ending: Ending,
        failed: Failed,
    ) -> None:
        super().__init__((), headers=headers, media_type=EVENTS)
        self._answers = answers
        self._n = n
        self._ending = ending
        self._failed = failed
        self._usage: Any = None  # added up over the prompts so far
        self._last: Members | None = None  # the last event of the response, with that usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await close_all(answer.generation for answer in self._answers)

    async def stream_response(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        merged = MergedStreams([answer.next for answer in self._answers])
        try:
            async for prompt, data in _items(merged):
                if body := b"".join(self._events(prompt, data)):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            last = EVENT + encode(self._last) + b"\n\n" if self._last else b""
            data = await self._ending(last + DONE)
        except ApiError as error:
            data = self._failed(error, b"")
        finally:
            await merged.close()
        await send({"type": "http.response.body", "body": data, "more_body": False})

    def _events(self, prompt: int, data: bytes) -> Iterator[bytes]:
        """Renumber the choices in one prompt's events.

        Usage is added up in `_last`, and the end of the prompt's stream is left out.

        Args:
            prompt: index of the prompt in the call.
        """
        for event in data.split(b"\n\n"):
            if not event.startswith(EVENT) or event == DONE.strip():
                continue
            body = members(event.removeprefix(EVENT))
            if choices := decode(body.get(CHOICES, b"[]"), type=list[Raw]):
                shifted = [_shifted(choice, prompt * self._n) for choice in choices]
                yield EVENT + encode({**body, CHOICES: shifted}) + b"\n\n"
            elif "usage" in body:
                self._usage = _sum(self._usage, decode(body["usage"]))
                self._last = {**body, "usage": Raw(encode(self._usage))}
            else:
                yield event + b"\n\n"  # an error


async def _items(merged: MergedStreams[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    while (item := await merged.next()) is not None:
        yield item


def _shifted(choice: Raw, by: int) -> Raw:
    fields = members(choice)
    return Raw(encode({**fields, "index": decode(fields["index"], type=int) + by}))


def _sum(left: Any, right: Any) -> Any:
    """Return the sum of two JSON values: numbers are added, objects field by field."""
    if isinstance(left, dict) and isinstance(right, dict):
        return {name: _sum(left.get(name), right.get(name)) for name in left | right}
    if left is None or right is None:
        return right if left is None else left
    return left + right if isinstance(left, int | float) else left
