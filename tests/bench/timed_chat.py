"""A chat whose answer is streamed, with the times of its pieces."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from openai import AsyncOpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam


class TimedAnswer(NamedTuple):
    """An answer as it came."""

    text: str
    begun_s: float  # monotonic time at which the request was sent
    times_s: Sequence[float]  # monotonic times of the pieces of the text
    usage: CompletionUsage | None  # None: the answer has ended too early

    @property
    def cached_tokens(self) -> int:
        """Return the prompt tokens that the server has found cached."""
        details = self.usage.prompt_tokens_details if self.usage else None
        return (details.cached_tokens if details else None) or 0


async def timed_chat(
    client: AsyncOpenAI,
    model: str,
    messages: Sequence[ChatCompletionMessageParam],
    tokens: int,
    *,
    on_begin: Callable[[], object] = lambda: None,
) -> TimedAnswer:
    """Send a conversation, and return the answer, which has at most `tokens` tokens.

    Args:
        on_begin: called when the first piece of the answer has come.
    """
    begun_s, times_s, texts = time.monotonic(), list[float](), list[str]()
    stream = await client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = None
    async for event in stream:
        if event.choices and event.choices[0].delta.content:
            times_s.append(time.monotonic())
            if len(times_s) == 1:
                on_begin()
            texts.append(event.choices[0].delta.content)
        usage = event.usage or usage
    return TimedAnswer("".join(texts), begun_s, times_s, usage)
