"""Log-probabilities of generated tokens are in OpenAI's two shapes."""

from collections.abc import Sequence

from kvroute.contract.generation import Alternative, TokenLogprob

FLOOR = -9999.0  # OpenAI's value for "very unlikely"; JSON has no infinity


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, object]:
    """Chat's shape: one entry for each token, which contains its alternatives."""
    content = [
        {**_entry(token.chosen), "top_logprobs": [_entry(other) for other in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, object]:
    """Completions' shape: parallel lists; `offset`: characters of the text before the tokens."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.chosen.token)
    return {
        "tokens": [token.chosen.token for token in tokens],
        "token_logprobs": [_finite(token.chosen.logprob) for token in tokens],
        "top_logprobs": [_by_text(token) for token in tokens],
        "text_offset": offsets,
    }


def characters(tokens: Sequence[TokenLogprob]) -> int:
    """The length of the tokens' text in characters, as in `text_offset`."""
    return sum(len(token.chosen.token) for token in tokens)


def _entry(alternative: Alternative) -> dict[str, object]:
    return {
        "token": alternative.token,
        "logprob": _finite(alternative.logprob),
        "bytes": list(alternative.token.encode()),
    }


def _by_text(token: TokenLogprob) -> dict[str, float]:
    """The alternatives and the chosen token by text; if two have the same text, the likelier."""
    by_text: dict[str, float] = {}
    for alternative in (*token.top, token.chosen):
        by_text.setdefault(alternative.token, _finite(alternative.logprob))
    return by_text


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)
