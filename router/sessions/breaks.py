"""A change in a chat's history: where its prompt differs from that of an earlier turn.

A cached prefix can be reused only up to the first change. The engine computes all text after the
change again, even text that both prompts have in common.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """The length and hash of some tokens of a prompt, without the tokens themselves."""

    tokens: int
    # Hash in hexadecimal. One router gives equal tokens equal hashes; each router has other hashes.
    hash: str


@dataclass(frozen=True, slots=True)
class Difference:
    """The first change between two prompts, and the number of equal tokens after it."""

    token: int  # position of the first token that differs, from 0
    before: Span  # the changed part in the earlier prompt
    after: Span  # the changed part in the later prompt
    common: int  # number of equal tokens directly after the changed part

    def around(self, tokens: int) -> slice:
        """Return the changed part of the later prompt, with `tokens` tokens on each side."""
        return slice(max(0, self.token - tokens), self.token + self.after.tokens + tokens)


@dataclass(frozen=True, slots=True)
class Break:
    """A change in a chat's history: the prompt does not continue that of the earlier turn."""

    role: str  # role of the changed message, or another part of the prompt, such as tools
    message: int | None  # number of the changed message, from 0; None: no message changed
    difference: Difference
    kind: str = ""  # kind of the changed text; empty if it is of no known kind

    @property
    def lost(self) -> range:
        """Return the positions of the tokens that could have been cache hits without the change."""
        begin = self.difference.token + self.difference.after.tokens
        return range(begin, begin + self.difference.common)

    def as_json(self, *, known_tokens: int) -> dict[str, Any] | None:
        """Return the break as shown to the client, or None if it lost no cache hits.

        Args:
            known_tokens: leading tokens of the prompt that some replica has or had cached. These
                were not lost.
        """
        tokens = self.lost.stop - max(self.lost.start, known_tokens)
        if tokens <= 0:
            return None
        before, after = self.difference.before, self.difference.after
        return {
            "message": {"index": self.message, "role": self.role},
            "kind": self.kind or None,
            "token": self.difference.token,
            "tokens": tokens,
            "before": {"tokens": before.tokens, "hash": before.hash},
            "after": {"tokens": after.tokens, "hash": after.hash},
        }
