"""Completion calls with several prompts.

Each prompt runs where its prefix is cached, and the client gets one response. Choice c of prompt p
has the index p * n + c.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvroute.router.api.errors import DONE, EVENTS, ApiError
from kvroute.router.dispatch.generation import Generation
from kvroute.router.dispatch.merge import Merged
from kvroute.router.dispatch.relay import Answer, Ending, Failed

EVENT = b"data: "

encode = msgspec.json.encode
decode = msgspec.json.decode


async def batched(
    generations: Sequence[Generation],
    headers: Mapping[str, str],
    *,
    n: int,
    ending: Ending,
    failed: Failed,
) -> Response:
    """Return the response to a call with several prompts.

    Args:
        n: choices of each prompt.

    Raises:
        ApiError: no replica can continue.
    """
    answers = [Answer(generation) for generation in generations]
    is_streamed = False
    try:
        await asyncio.gather(*(answer.begin() for answer in answers))
        for answer in answers:
            if answer.status != 200:  # all bodies differ in their prompts only
                refusal = await answer.whole()
                return Response(refusal, answer.status, headers, media_type=answer.content_type)
        is_streamed = answers[0].is_stream
        if is_streamed:
            return _BatchEvents(answers, headers, n=n, ending=ending, failed=failed)
        wholes = await asyncio.gather(*(answer.whole() for answer in answers))
    finally:
        if not is_streamed:
            _close(answers)
    return Response(
        ending(encode(one_body([decode(whole) for whole in wholes], n=n))),
        headers=headers,
        media_type="application/json",
    )


def one_body(bodies: Sequence[dict[str, Any]], *, n: int) -> dict[str, Any]:
    """Return the whole responses to each prompt as the response to all."""
    first, *others = bodies
    choices = [
        _moved(choice, prompt * n)
        for prompt, body in enumerate(bodies)
        for choice in body["choices"]
    ]
    usage = first.get("usage")
    for body in others:
        usage = _sum(usage, body.get("usage"))
    return {**first, "choices": choices, "usage": usage}


class _BatchEvents(StreamingResponse):
    """The events of all prompts as they come."""

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
        self._last: dict[str, Any] | None = None  # the event with the usage, summed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _close(self._answers)

    async def stream_response(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        merged = Merged([answer.next for answer in self._answers])
        try:
            async for prompt, data in _each(merged):
                if body := b"".join(self._events(prompt, data)):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            last = EVENT + encode(self._last) + b"\n\n" if self._last else b""
            data = self._ending(last + DONE)
        except ApiError as error:
            data = self._failed(error, b"")
        finally:
            await merged.close()
        await send({"type": "http.response.body", "body": data, "more_body": False})

    def _events(self, prompt: int, data: bytes) -> Iterator[bytes]:
        """One prompt's events with its choices' own numbers, without its end."""
        for event in data.split(b"\n\n"):
            if not event.startswith(EVENT) or event == DONE.strip():
                continue
            body = decode(event.removeprefix(EVENT))
            if body.get("choices"):
                body["choices"] = [_moved(each, prompt * self._n) for each in body["choices"]]
                yield EVENT + encode(body) + b"\n\n"
            elif "usage" in body:
                usage = (
                    _sum(self._last.get("usage"), body["usage"]) if self._last else body["usage"]
                )
                self._last = {**body, "usage": usage}
            else:
                yield event + b"\n\n"  # an error


async def _each(merged: Merged[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    while (item := await merged.next()) is not None:
        yield item


def _moved(choice: dict[str, Any], by: int) -> dict[str, Any]:
    return {**choice, "index": choice["index"] + by}


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of two JSON values: numbers are added, objects field by field."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _sum(one.get(name), other.get(name)) for name in one | other}
    if one is None or other is None:
        return other if one is None else one
    return one + other if isinstance(one, int | float) else one


def _close(answers: Sequence[Answer]) -> None:
    for answer in answers:
        answer.generation.close()
