"""Generates the tokens of a simulated engine. Each token is a hash of all tokens before it."""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from kvroute.contract.generation import TokenIds
from kvroute.replica.sim_engine.choice_output import Alternative, TokenLogprob
from kvroute.replica.sim_engine.sampling import Sampling

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_WORDS = 512  # maximum number of words in a vocabulary
ALTERNATIVE_LOGPROB = -9.0  # log-probability of every token that was not drawn


class Vocabulary:
    """The tokens that a simulated engine can generate, without the end-of-text token."""

    def __init__(self, words: dict[int, str]) -> None:
        self.words = words
        self._ids = tuple(words)

    @classmethod
    def of_numbers(cls, token_ids: Iterable[int]) -> "Vocabulary":
        """Return a vocabulary without a tokenizer: the word for token 1000 is " t1000"."""
        return cls({token_id: f" t{token_id}" for token_id in token_ids})

    @classmethod
    @lru_cache(maxsize=1)  # the ranks of a replica have one tokenizer, and share its words
    def of_tokenizer(cls, folder: str) -> "Vocabulary":
        """Return a vocabulary of lower-case words from the tokenizer in this folder.

        The tokenizer encodes each word as one token, also when the word follows other words.

        Raises:
            ValueError: The folder has no tokenizer.json, or the tokenizer has no such word.
        """
        from tokenizers import Tokenizer

        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder!r} has no tokenizer.json; choose a folder that has one")
        tokenizer = Tokenizer.from_file(str(path))
        words: dict[int, str] = {}
        for piece, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
            word = " " + piece[1:]
            if _is_word(piece) and _round_trips(tokenizer, word, token_id):
                words[token_id] = word
            if len(words) == MAX_WORDS:
                break
        if not words:
            raise ValueError(
                f"{path} has no word that is tokenised to one token; use another tokenizer"
            )
        return cls(words)

    def pick(self, number: int) -> int:
        """Return the token for a random number."""
        return self._ids[number % len(self._ids)]

    def logprob(self, token_id: int, *, alternatives: int) -> TokenLogprob:
        """Return log-probabilities for a response: 0 for the drawn token, and a low one for others.

        Args:
            token_id: The drawn token.
            alternatives: The number of tokens to list as the most likely ones.
        """
        chosen = Alternative(self.words[token_id], 0.0)
        others = [other for other in self._ids[:alternatives] if other != token_id]
        unlikely = [Alternative(self.words[other], ALTERNATIVE_LOGPROB) for other in others]
        return TokenLogprob(chosen, (chosen, *unlikely)[:alternatives])


def _is_word(piece: str) -> bool:
    """Return whether a vocabulary entry is a lower-case word after a space.

    A space is "Ġ" in byte-level BPE and "▁" in SentencePiece.
    """
    word = piece[1:]
    return (
        piece[:1] in ("Ġ", "▁")
        and len(word) > 1
        and word.isascii()
        and word.isalpha()
        and word.islower()
    )


def _round_trips(tokenizer: "Tokenizer", word: str, token_id: int) -> bool:
    """Return whether the word is tokenised to this token after any other word."""
    token_ids = tokenizer.encode("a" + word + word, add_special_tokens=False).ids
    return token_ids[-2:] == [token_id, token_id]


class TokenGenerator:
    """Draws the tokens of one choice.

    Each token depends only on the salt and on the tokens before it. So another engine continues a
    response exactly as this engine would.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: TokenIds, *, salt: int) -> None:
        self._vocabulary = vocabulary
        # Hash of the prompt and of all tokens drawn so far.
        self._hash = xxh3_64(np.ascontiguousarray(prompt, dtype="<u4").tobytes(), seed=salt)

    def next_token(self) -> int:
        token_id = self._vocabulary.pick(self._hash.intdigest())
        self._hash.update(token_id.to_bytes(4, "little"))
        return token_id


def salt(sampling: Sampling, index: int) -> int:
    """Return a number that differs for each choice and seed; 0 for a single greedy choice."""
    if sampling.temperature == 0 and sampling.n == 1:
        return 0
    return xxh3_64_intdigest(f"{sampling.seed}|{index}".encode())


class StopText:
    """Detects stop strings in a text that arrives in pieces.

    The text ends before the first stop string.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""  # text at the end that may be the beginning of a stop string

    def add(self, text: str) -> tuple[str, bool]:
        """Add text; return the text to send now, and whether the answer ends at a stop string."""
        text = self._held + text
        ends = [text.index(stop) for stop in self._stop if stop in text]
        if ends:
            self._held = ""
            return text[: min(ends)], True
        sent = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[sent:]
        return text[:sent], False

    def held_text(self) -> str:
        """Return the text that was held back. Call this when no more text follows."""
        return self._held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text are a beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
