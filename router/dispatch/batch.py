"""Responses to completion calls with several prompts.

The prompts are placed independently, and the client gets one response. With n choices for each
prompt, choice c of prompt p has the index p * n + c in this response.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

import msgspec
from fastapi import Response
from fastapi.responses import StreamingResponse
from msgspec import Raw
from starlette.types import Receive, Scope, Send

from kvroute.router.api.errors import DONE, EVENTS, JSON, ApiError, event
from kvroute.router.api.fair_lock import cancel_all, one_by_one
from kvroute.router.api.json_members import Members, members
from kvroute.router.dispatch.generation import Generation, StartPrompt
from kvroute.router.dispatch.relay import Ending, RelayedAnswer, placement_headers
from kvroute.router.dispatch.replica_errors import error_event, replica_error
from kvroute.router.placement.receipts import RECEIPTS

EVENT = b"data: "  # beginning of a server-sent event
# Number of items of all prompts' streams that are buffered, in addition to the first item and the
# end of each stream. While the buffer is full, the streams are not read, and join the items that
# wait in them.
WAITING_ITEMS = 64
CHOICES = "choices"  # the field of a response that has the choices of its prompts

Item = TypeVar("Item")

encode = msgspec.json.encode
decode = msgspec.json.decode


async def batch_response(
    starts: Iterable[StartPrompt], *, prompts: int, n: int, path: str, ending: Ending
) -> Response:
    """Start all prompts of a call, and return the response.

    The answers are read while further prompts start. If the prompts cannot all start at once, a
    streamed response begins before the last ones have started.

    Args:
        starts: each starts one prompt.
        prompts: number of prompts.
        n: number of choices for each prompt.
        path: the call's route.
        ending: changes the last bytes of the response.

    Raises:
        ApiError: a prompt cannot run, or no replica can continue the response to it.
    """
    answers = _Answers(starts, prompts)
    is_streamed = False
    try:
        await answers.merged.begin()
        is_streamed = answers.are_streams
        if is_streamed:
            return _BatchEvents(answers, n=n, path=path, ending=ending)
        bodies = dict([item async for item in answers.items()])
    except _RefusedPromptError as refusal:
        data = replica_error(refusal.body, refusal.status, path=path)
        return Response(data, refusal.status, answers.headers(), media_type=JSON)
    finally:
        if not is_streamed:
            await answers.merged.close()
    body = encode(await merge_bodies([bodies[prompt] for prompt in range(prompts)], n=n))
    data = await ending(answers.generations(), body)
    return Response(data, headers=answers.headers(), media_type=JSON)


class _RefusedPromptError(Exception):
    """A replica's HTTP application has refused a prompt."""

    def __init__(self, body: bytes, status: int) -> None:
        super().__init__(status)
        self.body = body
        self.status = status


class _Answers:
    """The answers to a call's prompts.

    Attributes:
        merged: the bytes of all answers. An answer that is not a stream is one item.
        are_streams: whether they are streams of events; known when the first item has arrived.
    """

    def __init__(self, starts: Iterable[StartPrompt], prompts: int) -> None:
        streams = (self._read(prompt, start) for prompt, start in enumerate(starts))
        self.merged = MergedStreams(streams, prompts)
        self.are_streams = False
        self._generations: dict[int, Generation] = {}  # index of a prompt that has started -> it

    def generations(self) -> list[Generation]:
        """Return the generations of the prompts that have started, in the order of the prompts."""
        return [self._generations[prompt] for prompt in sorted(self._generations)]

    def headers(self) -> dict[str, str]:
        """Return the headers that describe where the prompts that have started were placed."""
        return placement_headers(self.generations())

    async def items(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the index of a prompt and the next bytes of its answer."""
        while (item := await self.merged.next()) is not None:
            yield item

    async def _read(self, prompt: int, start: StartPrompt) -> AsyncGenerator[bytes, None]:
        generation = await start()
        self._generations[prompt] = generation
        answer = RelayedAnswer(generation)
        try:
            await answer.wait_for_status()
            if answer.status != 200:
                raise _RefusedPromptError(await answer.read_all(), answer.status)
            self.are_streams = answer.is_stream
            if not answer.is_stream:
                yield await answer.read_all()
                return
            while (data := await answer.next()) is not None:
                yield data
        finally:
            generation.close()


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

    The streams start one by one. The owner must call `close`.

    Args:
        streams: each is created when it starts, and closed when it has ended.
        total: number of streams.
    """

    def __init__(self, streams: Iterable[AsyncGenerator[Item, None]], total: int) -> None:
        self._streams = streams
        self._total = total
        self._queue: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(
            WAITING_ITEMS + 2 * total
        )
        self._starting: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []  # each reads one stream
        self._unfinished = total
        self._begun = set[int]()  # streams that have had an item or have ended
        self._has_begun = asyncio.Event()
        self._error: Exception | None = None  # the error of the first stream that failed

    async def begin(self) -> None:
        """Start all streams, and wait until each has had an item or the buffer is full.

        The buffer becomes full if some streams run on while others cannot start yet. Then these
        start while the caller reads the first items.

        Raises:
            Exception: a stream has raised it.
        """
        self._starting = asyncio.create_task(self._start())
        await self._has_begun.wait()
        if self._error is not None:
            raise self._error

    async def next(self) -> tuple[int, Item] | None:
        """Return the index of a stream and its next item; None when all streams have ended.

        Raises:
            Exception: a stream has raised it.
        """
        while self._unfinished:
            queued = await self._queue.get()
            if isinstance(queued, Exception):
                raise queued
            if queued is not None:
                return queued
            self._unfinished -= 1
        return None

    async def close(self) -> None:
        """Stop reading the streams, one by one."""
        if self._starting is not None:
            await cancel_all([self._starting])
        await cancel_all(self._tasks)

    async def _start(self) -> None:
        try:
            async for index, stream in one_by_one(enumerate(self._streams)):
                self._tasks.append(asyncio.create_task(self._read(index, stream)))
        except Exception as error:  # any error in making a stream; `next` raises it
            await self._fail(error)

    async def _read(self, index: int, stream: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    self._note(index)
                    await self._queue.put((index, item))
        except Exception as error:  # any error; `next` raises it
            await self._fail(error)
            return
        self._note(index)
        await self._queue.put(None)

    def _note(self, index: int) -> None:
        """Record that a stream has an item or has ended."""
        self._begun.add(index)
        if len(self._begun) == self._total or self._queue.full():
            self._has_begun.set()

    async def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._has_begun.set()
        await self._queue.put(error)


class _BatchEvents(StreamingResponse):
    """A stream of the events of all prompts, in the order of their arrival."""

    def __init__(self, answers: _Answers, *, n: int, path: str, ending: Ending) -> None:
        super().__init__((), headers=answers.headers(), media_type=EVENTS)
        self._answers = answers
        self._n = n
        self._path = path
        self._ending = ending
        self._usage: Any = None  # added up over the prompts so far
        self._last: Members | None = None  # the last event of the response, with that usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._answers.merged.close()

    async def stream_response(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for prompt, data in self._answers.items():
                if body := b"".join(self._events(prompt, data)):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            last = EVENT + encode(self._last) + b"\n\n" if self._last else b""
            data = await self._ending(self._answers.generations(), last + DONE)
        except ApiError as error:
            data = event(error, b"", path=self._path)
        except _RefusedPromptError as refusal:
            data = error_event(refusal.body, refusal.status, path=self._path)
        await send({"type": "http.response.body", "body": data, "more_body": False})

    def _events(self, prompt: int, data: bytes) -> Iterator[bytes]:
        """Renumber the choices in one prompt's events.

        Usage is added up in `_last`, and the end of the prompt's stream is left out.

        Args:
            prompt: index of the prompt in the call.
        """
        for item in data.split(b"\n\n"):
            if not item.startswith(EVENT) or item == DONE.strip():
                continue
            body = members(item.removeprefix(EVENT))
            if choices := decode(body.get(CHOICES, b"[]"), type=list[Raw]):
                shifted = [_shifted(choice, prompt * self._n) for choice in choices]
                yield EVENT + encode({**body, CHOICES: shifted}) + b"\n\n"
            elif "usage" in body:
                self._usage = _sum(self._usage, decode(body["usage"]))
                self._last = {**body, "usage": Raw(encode(self._usage))}
            else:
                yield item + b"\n\n"  # an error


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
