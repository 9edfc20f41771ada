"""Finds the prefixes that save the most tokens, named or not, in this router's own requests.

The cached beginning of a prompt ends where the prompt diverges from earlier ones. So a prefix that
many prompts share is a place where many of these beginnings end, or pass through. The prefixes that
save least are dropped.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvroute.blocks.fingerprint import Feature, Fingerprint
from kvroute.contract.generation import TokenIds

MEMORY_S = 60.0  # seconds after which a use counts 1/e
KEPT = 256  # prefixes; up to twice as many between two cleanups
SAME_USES = 0.9  # if this share of a prefix's uses continue to a longer one, only that one is hot
UNKNOWN: TokenIds = np.empty(0, dtype=np.uint32)


class Owner(NamedTuple):
    """Whose prompts have a prefix in common: a tenant's, in its namespace."""

    tenant: str = ""  # empty: everybody's
    namespace: str = ""


EVERYBODY = Owner()


@dataclass(slots=True)
class Hot:
    """A prefix, and what it saved recently."""

    end: Fingerprint  # fingerprint of the last block
    blocks: int
    token_ids: TokenIds = field(
        default_factory=lambda: UNKNOWN
    )  # token ids, known from the second use on
    longest_before: Fingerprint | None = None  # end of the longest known prefix that it begins with
    uses: float = 0.0  # decayed, as of at_s
    tokens_saved: float = 0.0
    at_s: float = 0.0
    owner: Owner = EVERYBODY

    def use(self, tokens: int, now_s: float) -> None:
        keep = math.exp((self.at_s - now_s) / MEMORY_S)
        self.uses = keep * self.uses + 1.0
        self.tokens_saved = keep * self.tokens_saved + tokens
        self.at_s = now_s

    def requests_per_s(self, now_s: float) -> float:
        return self.uses * math.exp((self.at_s - now_s) / MEMORY_S) / MEMORY_S

    def tokens_saved_per_s(self, now_s: float) -> float:
        return self.tokens_saved * math.exp((self.at_s - now_s) / MEMORY_S) / MEMORY_S


class HotPrefixes:
    """The prefixes of one router's requests, in bounded memory."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._known: dict[Fingerprint, Hot] = {}
        self._lengths = Counter[int]()  # number of blocks -> known prefixes of that length

    def see(
        self,
        token_ids: TokenIds,
        chain: Sequence[Fingerprint],
        cached_tokens: int,
        now_s: float,
        features: Sequence[Feature] = (),
        owner: Owner = EVERYBODY,
        shared_tokens: int = 0,
    ) -> None:
        """Count a prompt with these blocks, whose first `cached_tokens` came from a cache.

        Prefixes end before the first image, because declarations have only token ids.

        Args:
            shared_tokens: tokens at the start that all namespaces share.
        """
        text_tokens = features[0].offset if features else cached_tokens
        held = min(min(text_tokens, cached_tokens) // self._block_size, len(chain))
        if not held:
            return
        if chain[held - 1] not in self._known:
            whose = EVERYBODY if held * self._block_size <= shared_tokens else owner
            self._known[chain[held - 1]] = Hot(chain[held - 1], held, at_s=now_s, owner=whose)
            self._lengths[held] += 1
        before: Fingerprint | None = None
        for blocks in sorted(length for length in self._lengths if length <= held):
            hot = self._known.get(chain[blocks - 1])
            if hot is None:
                continue
            if hot.uses and not len(hot.token_ids):
                hot.token_ids = token_ids[: blocks * self._block_size].copy()
            hot.longest_before, before = before, hot.end
            hot.use(blocks * self._block_size, now_s)
        if len(self._known) > 2 * KEPT:
            self._forget(now_s)

    def top(self, count: int, now_s: float) -> list[Hot]:
        """Return the prefixes that save most.

        Each was used more than once, and not only as part of a longer prefix.
        """
        longer: dict[Fingerprint | None, float] = {}  # the highest use of any longer one
        for hot in self._known.values():
            uses = hot.requests_per_s(now_s)
            longer[hot.longest_before] = max(longer.get(hot.longest_before, 0.0), uses)
        own = [
            hot
            for hot in self._ranked(now_s)
            if len(hot.token_ids)
            and longer.get(hot.end, 0.0) < SAME_USES * hot.requests_per_s(now_s)
        ]
        return own[:count]

    def _ranked(self, now_s: float) -> list[Hot]:
        known = self._known.values()
        return sorted(known, key=lambda hot: hot.tokens_saved_per_s(now_s), reverse=True)

    def _forget(self, now_s: float) -> None:
        self._known = {hot.end: hot for hot in self._ranked(now_s)[:KEPT]}
        self._lengths = Counter(hot.blocks for hot in self._known.values())
