"""What a simulated engine generates, before it becomes a response."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alternative:
    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    chosen: Alternative
    top: tuple[Alternative, ...]  # likeliest first


@dataclass(frozen=True, slots=True)
class Output:
    """The next tokens of one choice."""

    index: int  # which of the n choices
    text: str  # may be empty: the beginning of a stop string is held back
    token_ids: tuple[int, ...]
    cached_tokens: int  # prompt tokens from the KV cache; the same in all outputs
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None  # "stop" | "length" in a choice's last output


def joined(outputs: Sequence[Output]) -> Output:
    """One output with the content of all; they are of one choice."""
    last = outputs[-1]
    return Output(
        last.index,
        "".join([output.text for output in outputs]),
        tuple([id_ for output in outputs for id_ in output.token_ids]),
        last.cached_tokens,
        tuple([each for output in outputs for each in output.logprobs]),
        last.finish_reason,
    )
