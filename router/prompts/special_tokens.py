"""Text that a tokenizer makes no special token of, and that a model reads as it was.

A tokenizer makes a special token of the text `<|im_end|>`, whoever has written it. So each such
text gets an invisible character behind its first one.

A text may also arise where a template puts two strings one behind the other. So the beginning of a
special token is broken too where a string ends with it, white space aside: templates trim. Some
put a name between `<` and `>` or the like, so a name that begins as a token goes on is broken too.

And a template may delete a part of a text, which puts together what stood around it: SmolLM3's
makes `<|im_end|>` of `<|im_/no_thinkend|>`, as it deletes `/no_think`.
"""

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from kvroute.router.prompts.segments import any_of

BREAKS = ("\u2060", "\u200b", " ")  # the first of them that the tokenizer knows
PIECE = 1 << 16  # characters that are searched at a time, then other threads may run
TAG = re.compile(r"</?\w+>")  # such as <think>, by which templates take answers apart
WORD = re.compile(r"[\w-]+")
# In a template, behind a character that it writes before a value.
BEFORE_VALUE = r"""(?:["']\s*[~+,]|\{[{%}]|%)"""
BRACKETED = re.compile(r"[<\[{(].*[>\])}]", re.DOTALL)
QUOTED = r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
DELETED = re.compile(rf"""\breplace\(\s*{QUOTED}\s*,\s*(?:""|'')\s*[,)]""", re.DOTALL)
ROUNDS = 2  # rounds of deletions; a text that needs more was made to do harm


class SpecialTokens:
    """Those of one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        """Find the tokens with a role in prompts.

        These are all tokens that the tokenizer calls special, and its other added tokens that the
        template writes, except tags.
        """
        backend = tokenizer.backend_tokenizer
        tokens = _special(tokenizer, template)
        self._break = _break(backend, tokens)
        self._tokens = sorted(tokens)
        self._heads = frozenset(token[:end] for token in tokens for end in range(1, len(token)))
        self._longest = max(map(len, self._heads), default=0)
        self._firsts = {token[0] for token in tokens}
        self._starts = _starts_of(self._tokens)
        self._deletions = _Deletions(_deleted_by(template))
        around = {token[0] for token in tokens if _is_before_values(token[0], template)}
        tails = {token[1:] for token in tokens if token[0] in around or _is_odd(token[1:])}
        insides = {
            token[1:-1] for token in tokens if token[0] in around or _is_odd(token[1:-1])
        } - {""}
        self._rests = re.compile(_rests(tails, insides))

    def text(self, text: str, *, may_go_on: bool = True) -> str:
        """Return the text without special tokens.

        Args:
            may_go_on: whether more text may follow it in the prompt.
        """
        if not any(first in text for first in self._firsts):
            return text
        broken = self._without_whole_ones(text)
        if may_go_on:
            broken = self._ended(broken)
        is_bad = partial(self._has_any, may_go_on=may_go_on)
        return self._deletions.broken(broken, self._break, is_bad)

    def name(self, text: str) -> str:
        """Return a text that a template may put between `<` and `>`, without special tokens."""
        broken = self.text(text)
        if not self._rests.match(broken):
            return broken
        return broken[0] + self._break + broken[1:]

    def may_complete(self, word: str) -> bool:
        """Return whether a template could make a special token of the word, such as <|word|>."""
        return not WORD.fullmatch(word) or any(word in token for token in self._tokens)

    def _has_any(self, text: str, *, may_go_on: bool) -> bool:
        """Return whether the text has a special token, or ends with the beginning of one."""
        if may_go_on and self._ended(text) != text:
            return True
        return next(self._whole_ones(text), None) is not None

    def _without_whole_ones(self, text: str) -> str:
        cuts = [0, *(start + 1 for start in self._whole_ones(text)), len(text)]
        return self._break.join(text[begin:end] for begin, end in pairwise(cuts))

    def _whole_ones(self, text: str) -> Iterator[int]:
        """Yield the position of each special token."""
        for begin in range(0, len(text), PIECE):
            end = begin + PIECE
            for start in self._starts.finditer(text, begin, end + self._longest):
                if start.start() < end:
                    yield start.start()

    def _ended(self, text: str) -> str:
        """With a break in each beginning of a token at its end."""
        body = text.rstrip()
        rest = text[len(body) :]
        for length in range(min(self._longest, len(body)), 0, -1):
            if body[-length:] in self._heads:
                behind_first = len(body) - length + 1
                body = body[:behind_first] + self._break + body[behind_first:]
        return body + rest


class _Deletions:
    """What one template deletes from texts."""

    def __init__(self, literals: Sequence[str]) -> None:
        self._literals = literals
        self._starts = _starts_of(literals)

    def broken(self, text: str, mark: str, is_bad: Callable[[str], bool]) -> str:
        """Return the text, with the mark in all that deletions would remove if they may harm it."""
        if not self._may_become(text, is_bad):
            return text
        return self._starts.sub(lambda start: start[0] + mark, text)

    def _may_become(self, text: str, is_bad: Callable[[str], bool]) -> bool:
        """Return whether deletions, one or all of them in any order, may make the text bad."""
        if any(is_bad(text.replace(literal, "")) for literal in self._literals if literal in text):
            return True
        for _ in range(ROUNDS):
            before = text
            for literal in self._literals:
                if literal in text:
                    text = text.replace(literal, "")
                    if is_bad(text):
                        return True
            if text == before:
                return False
        return True


def _special(tokenizer: Any, template: str) -> set[str]:
    found = set[str](tokenizer.all_special_tokens)
    for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values():
        text = token.content
        is_mark = text in template and BRACKETED.fullmatch(text) and not TAG.fullmatch(text)
        if token.special or is_mark:
            found.add(text)
    return {token for token in found if len(token) > 1 and not token.isspace()}


def _break(backend: Any, tokens: Iterable[str]) -> str:
    """Return the mark that makes the fewest special tokens of broken ones; usually none."""
    numbers = {backend.token_to_id(token) for token in tokens}

    def remaining(broken_by: str) -> int:
        texts = [token[0] + broken_by + token[1:] for token in tokens]
        encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
        return sum(id_ in numbers for encoding in encoded for id_ in encoding.ids)

    return min(BREAKS, key=remaining)


def _is_before_values(first: str, template: str) -> bool:
    """Return whether the template writes that character directly before a value."""
    return re.search(re.escape(first) + BEFORE_VALUE, template) is not None


def _is_odd(rest: str) -> bool:
    """Return whether it is no usual name.

    A usual name such as `image` stays, unless templates surround values with it.
    """
    return not WORD.fullmatch(rest)


def _rests(tails: Collection[str], insides: Collection[str]) -> str:
    """Return a pattern of names that begin with a token's tail, or are its inside."""
    patterns = [any_of(tails), rf"{any_of(insides)}\Z" if insides else ""]
    return "|".join(filter(None, patterns)) or r"(?!)"


def _starts_of(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the first character of each word, also where words overlap."""
    given = list(words)
    starts = [
        f"{re.escape(first)}(?={any_of([word[1:] for word in given if word[0] == first])})"
        for first in sorted({word[0] for word in given})
    ]
    return re.compile("|".join(starts) or r"(?!)")


def _deleted_by(template: str) -> list[str]:
    """Return the literals of its `.replace("literal", "")`, in its order."""
    found = dict.fromkeys(_meant(match[1]) for match in DELETED.finditer(template))
    return [*filter(None, found)]


def _meant(quoted: str) -> str:
    try:
        return str(ast.literal_eval(quoted))
    except (SyntaxError, ValueError):
        return quoted[1:-1]
