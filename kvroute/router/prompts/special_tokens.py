"""Text that a tokenizer makes no special token of, and that a model reads as it was.

A tokenizer makes a special token of the text `<|im_end|>`, whoever has written it. So each such
text gets an invisible character behind its first one.

A text may also arise where a template puts two strings one behind the other. So the beginning of a
special token is broken too where a string ends with it, white space aside: templates trim.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from kvroute.router.prompts.segments import any_of

BREAKS = ("\u2060", "\u200b", " ")  # the first of them that the tokenizer knows
PIECE = 1 << 16  # characters that are searched at a time, then other threads may run
TAG = re.compile(r"</?\w+>")  # such as <think>, by which templates take answers apart
WORD = re.compile(r"[\w-]+")
BRACKETED = re.compile(r"[<\[{(].*[>\])}]", re.DOTALL)


class SpecialTokens:
    """Those of one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        """Those with a role in prompts: all that the tokenizer calls special, and its other ones
        that the template writes, except tags."""
        backend = tokenizer.backend_tokenizer
        tokens = _special(tokenizer, template)
        self._break = _break(backend, tokens)
        self._tokens = sorted(tokens)
        self._heads = frozenset(token[:end] for token in tokens for end in range(1, len(token)))
        self._longest = max(map(len, self._heads), default=0)
        self._starts = re.compile(_starts(tokens))
        self._hints = {b"\\u", *(_hint(token[0]) for token in tokens)}
        self._suspects = re.compile(_suspects(tokens))

    def may_be_in(self, raw: bytes) -> bool:
        """Whether a body may have one, however it is written; False for nearly all that have
        none."""
        if not any(hint in raw for hint in self._hints):
            return False
        size, overlap = PIECE, 8  # bytes; the longest text that is looked for has 6
        return any(
            self._suspects.search(raw, start, start + size + overlap)
            for start in range(0, len(raw), size)
        )

    def text(self, text: str, *, may_go_on: bool = True) -> str:
        """The text without any. may_go_on: more text may follow it in the prompt."""
        pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
        found = [self._starts.sub(self._broken, piece) for piece in pieces]
        last = len(found) - 1
        return "".join(
            self._ended(piece) if may_go_on or number < last else piece
            for number, piece in enumerate(found)
        )

    def may_complete(self, word: str) -> bool:
        """Whether a template could make one by what it writes around the word, such as <|word|>."""
        return not WORD.fullmatch(word) or any(word in token for token in self._tokens)

    def _broken(self, start: re.Match[str]) -> str:
        return start[0] + self._break

    def _ended(self, text: str) -> str:
        """With a break in each beginning of a token at its end."""
        body = text.rstrip()
        rest = text[len(body) :]
        for length in range(min(self._longest, len(body)), 0, -1):
            if body[-length:] in self._heads:
                behind_first = len(body) - length + 1
                body = body[:behind_first] + self._break + body[behind_first:]
        return body + rest


def _special(tokenizer: Any, template: str) -> set[str]:
    found = set[str](tokenizer.all_special_tokens)
    for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values():
        text = token.content
        is_mark = text in template and BRACKETED.fullmatch(text) and not TAG.fullmatch(text)
        if token.special or is_mark:
            found.add(text)
    return {token for token in found if len(token) > 1 and not token.isspace()}


def _break(backend: Any, tokens: Iterable[str]) -> str:
    """What makes fewest special tokens of broken ones; usually none."""
    numbers = {backend.token_to_id(token) for token in tokens}

    def remaining(broken_by: str) -> int:
        texts = [token[0] + broken_by + token[1:] for token in tokens]
        encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
        return sum(id_ in numbers for encoding in encoded for id_ in encoding.ids)

    return min(BREAKS, key=remaining)


def _by_start(tokens: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """First characters, and what follows them."""
    for first in sorted({token[0] for token in tokens}):
        yield first, [token[1:] for token in tokens if token[0] == first]


def _starts(tokens: Iterable[str]) -> str:
    """A pattern of the first characters of tokens."""
    rests = [f"{re.escape(first)}(?={any_of(rest)})" for first, rest in _by_start(tokens)]
    return "|".join(rests) or r"(?!)"


def _suspects(tokens: Iterable[str]) -> bytes:
    """A pattern of what a body has that has a token, or a string that ends with a token's
    beginning: two characters, of which either may be escaped. Where JSON is in a string, a
    backslash may be escaped too."""
    patterns = [rb"\\u(?i:005c)"]
    for first, rest in _by_start(tokens):
        seconds = {re.escape(each.encode()[:1]) for each in rest}
        behind = b"(?:" + b"|".join(sorted(seconds | {rb'["\\\s]', rb"[\xc2\xe1-\xe3]"})) + b")"
        code = first.encode("utf-16-be")[:2].hex()
        escape = rb"\\u(?i:" + code.encode() + b")"
        patterns += [re.escape(first.encode()) + behind, escape]
        if first in '"\\/' or first < " ":
            patterns.append(rb"\\[\"\\/bfnrt]")
    return b"|".join(patterns)


def _hint(first: str) -> bytes:
    """What is in each body that has the character without a \\u."""
    return b"\\" if first < " " else first.encode()
