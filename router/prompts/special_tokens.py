"""Breaks special tokens in a client's text, so that the tokenizer reads them as ordinary text.

A tokenizer turns the text `<|im_end|>` into a special token, even if a client has written it. To
prevent this, an invisible character is inserted after the first character of such a text. This is
called a break. The model still reads the text as it was written.

A special token can also arise in a template:

- The template joins two strings. So if a string ends with the first characters of a special token,
  these are broken too. White space at the end does not count, because templates remove it.
- The template writes a name between characters such as `<` and `>`. So a name is broken too if it
  becomes a special token together with such a character before it, as the name `|im_end|>` does.
- The template deletes a part of a text. SmolLM3's template deletes `/no_think`, which turns
  `<|im_/no_thinkend|>` into `<|im_end|>`. So if a text would then have a special token, the part
  that the template deletes is broken.
"""

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from kvroute.router.prompts.segments import any_of

# Characters that can be inserted as a break, the best first.
BREAKS = ("\u2060", "\u200b", " ")
PIECE = 1 << 16  # characters that are searched at a time; other threads may run after each piece
# A tag such as <think>. Templates split answers at tags, so tags in texts are not broken.
TAG = re.compile(r"</?\w+>")
WORD = re.compile(r"[\w-]+")
# Matches how a template's source continues after a character that is written directly before a
# value, as after `<` in `'<' + role`, in `<{{ role }}` and in `'<%s'`.
BEFORE_VALUE = r"""(?:["']\s*[~+,]|\{[{%}]|%)"""
# Text in brackets, such as <|im_end|>.
BRACKETED = re.compile(r"[<\[{(].*[>\])}]", re.DOTALL)
# A string literal in a template.
QUOTED = r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
# A call in a template that deletes a literal from a text: .replace("literal", "").
DELETED = re.compile(rf"""\breplace\(\s*{QUOTED}\s*,\s*(?:""|'')\s*[,)]""", re.DOTALL)
# Number of rounds in which all deletions are tried on a text, one after the other. A text that the
# last round still changes counts as harmful.
MAX_ROUNDS = 2


class SpecialTokens:
    """Breaks the special tokens of a tokenizer and its chat template, where a text has them."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        """Find the special tokens.

        These are all tokens that the tokenizer declares as special, and other added tokens that the
        template contains, except tags.
        """
        backend = tokenizer.backend_tokenizer
        tokens = _special(tokenizer, template)
        self._break = _break(backend, tokens)
        self._tokens = sorted(tokens)
        # All texts with which a special token begins, except the whole tokens.
        self._heads = frozenset(token[:end] for token in tokens for end in range(1, len(token)))
        self._longest = max(map(len, self._heads), default=0)
        self._firsts = {token[0] for token in tokens}
        self._starts = _starts_of(self._tokens)
        self._deletions = _Deletions(_deleted_by(template))
        # First characters of special tokens that the template writes directly before values.
        before = {token[0] for token in tokens if _is_before_values(token[0], template)}
        # What no name may start with, and what no name may be; see _name_pattern. Ordinary words
        # are allowed unless the template writes the token's first character before a value.
        tails = {token[1:] for token in tokens if token[0] in before or not _is_word(token[1:])}
        insides = {
            token[1:-1] for token in tokens if token[0] in before or not _is_word(token[1:-1])
        } - {""}
        self._harmful_names = re.compile(_name_pattern(tails, insides))

    def text(self, text: str, *, is_followed: bool = True) -> str:
        """Return the text with its special tokens broken.

        Args:
            is_followed: whether other text may follow this text in the prompt.
        """
        if not any(first in text for first in self._firsts):
            return text
        broken = self._break_tokens(text)
        if is_followed:
            broken = self._break_end(broken)
        is_harmful = partial(self._has_any, is_followed=is_followed)
        return self._deletions.prevent(broken, self._break, is_harmful)

    def name(self, text: str) -> str:
        """Return a name, with breaks so that no template can make a special token of it.

        A template may write the name between `<` and `>`.
        """
        broken = self.text(text)
        if not self._harmful_names.match(broken):
            return broken
        return broken[0] + self._break + broken[1:]

    def may_complete(self, word: str) -> bool:
        """Return whether a template could make a special token of the word, such as <|word|>."""
        return not WORD.fullmatch(word) or any(word in token for token in self._tokens)

    def _has_any(self, text: str, *, is_followed: bool) -> bool:
        """Return whether the text has a special token, or ends with the beginning of one."""
        if is_followed and self._break_end(text) != text:
            return True
        return next(self._positions(text), None) is not None

    def _break_tokens(self, text: str) -> str:
        """Return the text with a break in each special token."""
        cuts = [0, *(start + 1 for start in self._positions(text)), len(text)]
        return self._break.join(text[begin:end] for begin, end in pairwise(cuts))

    def _positions(self, text: str) -> Iterator[int]:
        """Yield the position of each special token in the text."""
        for begin in range(0, len(text), PIECE):
            end = begin + PIECE
            for start in self._starts.finditer(text, begin, end + self._longest):
                if start.start() < end:
                    yield start.start()

    def _break_end(self, text: str) -> str:
        """Return the text with a break in each beginning of a special token that it ends with."""
        body = text.rstrip()
        space = text[len(body) :]
        for length in range(min(self._longest, len(body)), 0, -1):
            if body[-length:] in self._heads:
                second = len(body) - length + 1  # position of the beginning's second character
                body = body[:second] + self._break + body[second:]
        return body + space


class _Deletions:
    """The literals that one template deletes from texts."""

    def __init__(self, literals: Sequence[str]) -> None:
        self._literals = literals
        self._starts = _starts_of(literals)

    def prevent(self, text: str, mark: str, is_harmful: Callable[[str], bool]) -> str:
        """Return the text, with each literal broken by the mark if deletions could be harmful.

        Args:
            mark: the character to insert as a break.
            is_harmful: returns whether a text has a special token.
        """
        if not self._may_become(text, is_harmful):
            return text
        return self._starts.sub(lambda start: start[0] + mark, text)

    def _may_become(self, text: str, is_harmful: Callable[[str], bool]) -> bool:
        """Return whether deleting one literal, or all of them in turn, may make a special token."""
        if any(
            is_harmful(text.replace(literal, "")) for literal in self._literals if literal in text
        ):
            return True
        for _ in range(MAX_ROUNDS):
            before = text
            for literal in self._literals:
                if literal in text:
                    text = text.replace(literal, "")
                    if is_harmful(text):
                        return True
            if text == before:
                return False
        return True


def _special(tokenizer: Any, template: str) -> set[str]:
    """Return the special tokens; see SpecialTokens."""
    special = set[str](tokenizer.all_special_tokens)
    for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values():
        text = token.content
        is_mark = text in template and BRACKETED.fullmatch(text) and not TAG.fullmatch(text)
        if token.special or is_mark:
            special.add(text)
    return {token for token in special if len(token) > 1 and not token.isspace()}


def _break(backend: Any, tokens: Iterable[str]) -> str:
    """Return the character that breaks the most special tokens; usually it breaks all of them."""
    numbers = {backend.token_to_id(token) for token in tokens}

    def remaining(broken_by: str) -> int:
        """Return how many special tokens the tokenizer still finds with this break."""
        texts = [token[0] + broken_by + token[1:] for token in tokens]
        encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
        return sum(id_ in numbers for encoding in encoded for id_ in encoding.ids)

    return min(BREAKS, key=remaining)


def _is_before_values(first: str, template: str) -> bool:
    """Return whether the template writes the character `first` directly before a value."""
    return re.search(re.escape(first) + BEFORE_VALUE, template) is not None


def _is_word(text: str) -> bool:
    """Return whether a text is an ordinary word, such as `image`, which may be a harmless name."""
    return WORD.fullmatch(text) is not None


def _name_pattern(tails: Collection[str], insides: Collection[str]) -> str:
    """Return a pattern that matches each name from which a template could make a special token.

    Args:
        tails: special tokens without their first character. A name may not start with one.
        insides: special tokens without their first and last character. A name may not equal one.
    """
    patterns = [any_of(tails), rf"{any_of(insides)}\Z" if insides else ""]
    return "|".join(filter(None, patterns)) or r"(?!)"


def _starts_of(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the first character of each word in a text.

    So it also finds words that overlap.
    """
    words = list(words)
    starts = [
        f"{re.escape(first)}(?={any_of([word[1:] for word in words if word[0] == first])})"
        for first in sorted({word[0] for word in words})
    ]
    return re.compile("|".join(starts) or r"(?!)")


def _deleted_by(template: str) -> list[str]:
    """Return the literals that the template deletes by `.replace("literal", "")`, in its order."""
    literals = dict.fromkeys(_value_of(match[1]) for match in DELETED.finditer(template))
    return [*filter(None, literals)]


def _value_of(quoted: str) -> str:
    """Return the value of a string literal."""
    try:
        return str(ast.literal_eval(quoted))
    except (SyntaxError, ValueError):
        return quoted[1:-1]
