"""Responses to completion calls with several prompts.

The prompts are placed independently, and the client gets one response. With n choices for each
prompt, choice c of prompt p has the index p * n + c in this response.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvroute.router.api.errors import DONE, EVENTS, JSON, ApiError
from kvroute.router.dispatch.generation import Generation
from kvroute.router.dispatch.merge import MergedStreams
from kvroute.router.dispatch.relay import Answer, Ending, Failed, Refused

EVENT = b"data: "  # beginning of a server-sent event

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
        await asyncio.gather(*(answer.wait_for_status() for answer in answers))
        for answer in answers:
            if answer.status != 200:  # the calls differ only in their prompts: one error is enough
                refusal = refused(await answer.read_all(), answer.status)
                return Response(refusal, answer.status, headers, media_type=JSON)
        is_streamed = answers[0].is_stream
        if is_streamed:
            return _BatchEvents(answers, headers, n=n, ending=ending, failed=failed)
        bodies = await asyncio.gather(*(answer.read_all() for answer in answers))
    finally:
        if not is_streamed:
            _close(answers)
    return Response(
        ending(encode(merge_bodies([decode(body) for body in bodies], n=n))),
        headers=headers,
        media_type=JSON,
    )


def merge_bodies(bodies: Sequence[dict[str, Any]], *, n: int) -> dict[str, Any]:
    """Merge the response bodies of all prompts into one.

    Args:
        n: number of choices for each prompt.
    """
    first, *others = bodies
    choices = [
        _shifted(choice, prompt * n)
        for prompt, body in enumerate(bodies)
        for choice in body["choices"]
    ]
    usage = first.get("usage")
    for body in others:
        usage = _sum(usage, body.get("usage"))
    return {**first, "choices": choices, "usage": usage}


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
        # The last event of the response: the usage, added up over the prompts so far.
        self._last: dict[str, Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _close(self._answers)

    async def stream_response(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        merged = MergedStreams([answer.next for answer in self._answers])
        try:
            async for prompt, data in _items(merged):
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
        """Renumber the choices in one prompt's events.

        Usage is added up in `_last`, and the end of the prompt's stream is left out.

        Args:
            prompt: index of the prompt in the call.
        """
        for event in data.split(b"\n\n"):
            if not event.startswith(EVENT) or event == DONE.strip():
                continue
            body = decode(event.removeprefix(EVENT))
            if body.get("choices"):
                body["choices"] = [_shifted(c, prompt * self._n) for c in body["choices"]]
                yield EVENT + encode(body) + b"\n\n"
            elif "usage" in body:
                usage = (
                    _sum(self._last.get("usage"), body["usage"]) if self._last else body["usage"]
                )
                self._last = {**body, "usage": usage}
            else:
                yield event + b"\n\n"  # an error


async def _items(merged: MergedStreams[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    while (item := await merged.next()) is not None:
        yield item


def _shifted(choice: dict[str, Any], by: int) -> dict[str, Any]:
    return {**choice, "index": choice["index"] + by}


def _sum(left: Any, right: Any) -> Any:
    """Return the sum of two JSON values: numbers are added, objects field by field."""
    if isinstance(left, dict) and isinstance(right, dict):
        return {name: _sum(left.get(name), right.get(name)) for name in left | right}
    if left is None or right is None:
        return right if left is None else left
    return left + right if isinstance(left, int | float) else left


def _close(answers: Sequence[Answer]) -> None:
    for answer in answers:
        answer.generation.close()
