"""The tokens that answers report, by OpenAI's and Anthropic's names."""

import msgspec
from msgspec import Struct

from kvroute.contract.unreadable import DECODE_ERRORS


class TokenUsage(Struct, frozen=True, omit_defaults=True):
    """Numbers of tokens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # part of prompt_tokens that came from a cache
    answer_tokens: int = 0
    reasoning_tokens: int = 0  # part of answer_tokens

    def __add__(self, other: "TokenUsage") -> "TokenUsage":
        return TokenUsage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.answer_tokens + other.answer_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


class _Details(Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class Reported(Struct):
    """The field `usage` of an answer."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None

    def counted(self) -> TokenUsage:
        """Return the numbers of tokens."""
        prompt_details = self.prompt_tokens_details or self.input_tokens_details or _Details()
        answer_details = self.completion_tokens_details or self.output_tokens_details or _Details()
        prompt = self.prompt_tokens or self.input_tokens or 0
        # Anthropic's input_tokens exclude the cached ones.
        prompt += self.cache_read_input_tokens or 0
        return TokenUsage(
            prompt_tokens=prompt,
            cached_tokens=prompt_details.cached_tokens or self.cache_read_input_tokens or 0,
            answer_tokens=self.completion_tokens or self.output_tokens or 0,
            reasoning_tokens=answer_details.reasoning_tokens or 0,
        )


class UsageOnly(Struct):
    """The part of an answer that has its tokens."""

    usage: Reported | None = None


def usage_of(body: bytes) -> TokenUsage:
    """Return the tokens of an answer; none if it does not report them."""
    try:
        reported = msgspec.json.decode(body, type=UsageOnly).usage
    except DECODE_ERRORS:
        return TokenUsage()
    return reported.counted() if reported else TokenUsage()
