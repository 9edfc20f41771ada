"""What a simulated engine says: tokens that follow from the tokens before them, and their text."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from replica.protocol import Alternative, Sampling, TokenIds, TokenLogprob

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_WORDS = 512
UNLIKELY = -9.0  # log probability of every token that was not drawn


class Vocabulary:
    """The tokens an engine may say. End-of-text is none of them."""

    def __init__(self, words: dict[int, str]) -> None:
        self.words = words
        self._ids = tuple(words)

    @classmethod
    def of_numbers(cls, token_ids: Iterable[int]) -> "Vocabulary":
        """Text that names its token, for when there is no tokenizer."""
        return cls({token_id: f" t{token_id}" for token_id in token_ids})

    @classmethod
    def of_tokenizer(cls, folder: str) -> "Vocabulary":
        """Lower-case words that tokenise back to themselves wherever they stand in a text.

        folder: holds a tokenizer.json. Raises ValueError when it does not, or knows no such word.
        """
        from tokenizers import Tokenizer

        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"tokenizer is {folder!r}; expected a folder with a tokenizer.json")
        tokenizer = Tokenizer.from_file(str(path))
        words: dict[int, str] = {}
        for piece, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
            word = " " + piece[1:]
            if _is_word(piece) and _round_trips(tokenizer, word, token_id):
                words[token_id] = word
            if len(words) == MAX_WORDS:
                break
        if not words:
            raise ValueError(f"{path} has no word that tokenises back to itself; use another one")
        return cls(words)

    def pick(self, number: int) -> int:
        """The token that a random number stands for."""
        return self._ids[number % len(self._ids)]

    def logprob(self, token_id: int, *, alternatives: int) -> TokenLogprob:
        """The drawn token as a certainty, and others to fill the list."""
        chosen = Alternative(self.words[token_id], token_id, 0.0)
        others = [other for other in self._ids[:alternatives] if other != token_id]
        unlikely = [Alternative(self.words[other], other, UNLIKELY) for other in others]
        return TokenLogprob(chosen, (chosen, *unlikely)[:alternatives])


def _is_word(piece: str) -> bool:
    """Whether a vocabulary entry is a word after a space, as both BPE dialects write it."""
    word = piece[1:]
    return (
        piece[:1] in ("Ġ", "▁")
        and len(word) > 1
        and word.isascii()
        and word.isalpha()
        and word.islower()
    )


def _round_trips(tokenizer: "Tokenizer", word: str, token_id: int) -> bool:
    """Whether the word is this token after any other word."""
    token_ids = tokenizer.encode("a" + word + word, add_special_tokens=False).ids
    return token_ids[-2:] == [token_id, token_id]


class Voice:
    """Draws one choice's tokens: each follows from all tokens before it and from nothing else, so
    a generation that resumes elsewhere goes on as it would have here."""

    def __init__(self, vocabulary: Vocabulary, prompt: TokenIds, *, salt: int) -> None:
        self._vocabulary = vocabulary
        self._said = xxh3_64(np.ascontiguousarray(prompt, dtype="<u4").tobytes(), seed=salt)

    def next_token(self) -> int:
        token_id = self._vocabulary.pick(self._said.intdigest())
        self._said.update(token_id.to_bytes(4, "little"))
        return token_id


def salt(sampling: Sampling, index: int) -> int:
    """Sets choices and seeds apart; a single greedy choice has none."""
    if sampling.temperature == 0 and sampling.n == 1:
        return 0
    return xxh3_64_intdigest(f"{sampling.seed}|{index}".encode())


class StopText:
    """A text that ends before the first stop string in it."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""  # could be the beginning of a stop string

    def add(self, text: str) -> tuple[str, bool]:
        """The text that can be sent now, and whether a stop string ended it."""
        text = self._held + text
        ends = [text.index(stop) for stop in self._stop if stop in text]
        if ends:
            self._held = ""
            return text[: min(ends)], True
        sent = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[sent:]
        return text[:sent], False

    def rest(self) -> str:
        """What was held back, once no more text follows."""
        return self._held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that could begin the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
