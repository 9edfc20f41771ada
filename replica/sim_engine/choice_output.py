"""The output of a simulated engine, before it is converted to an HTTP response."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token's text and its log-probability."""

    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position of the answer."""

    chosen: Alternative  # the token that was drawn
    top: tuple[Alternative, ...]  # the most likely tokens, the most likely one first


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """The next tokens of one choice."""

    index: int  # number of the choice, from 0
    text: str  # empty if it was held back because it may be the beginning of a stop string
    token_ids: tuple[int, ...]
    cached_tokens: int  # prompt tokens from the KV cache; the same in all outputs
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None  # "stop" | "length" in a choice's last output


def joined(outputs: Sequence[ChoiceOutput]) -> ChoiceOutput:
    """Return one output with the content of consecutive outputs of one choice."""
    last = outputs[-1]
    return ChoiceOutput(
        last.index,
        "".join([output.text for output in outputs]),
        tuple([id_ for output in outputs for id_ in output.token_ids]),
        last.cached_tokens,
        tuple([logprob for output in outputs for logprob in output.logprobs]),
        last.finish_reason,
    )
