"""Finds the prefixes that save the most tokens in this router's own requests.

The hit of a prompt ends where the prompt diverges from earlier ones. So the end of a hit is the end
of a prefix that several prompts share. A prompt counts as a use of such a prefix if its own hit
includes the prefix. To bound the memory, the prefixes that save the fewest tokens are dropped.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvroute.blocks.fingerprint import Feature, Fingerprint
from kvroute.contract.generation import TokenIds

MEMORY_S = 60.0  # seconds after which the weight of a use has decayed to 1/e
MAX_PREFIXES = 256  # prefixes that a cleanup keeps; a cleanup starts at twice this number
# If at least this share of a prefix's uses are also uses of one longer prefix, `top` returns only
# the longer one.
SAME_USES = 0.9
UNKNOWN: TokenIds = np.empty(0, dtype=np.uint32)  # token ids that are not recorded yet


class Owner(NamedTuple):
    """Who shares a prefix: the prompts of one tenant, or all prompts."""

    tenant: str = ""  # empty: all tenants share it
    namespace: str = ""  # namespace of the prefix's blocks; empty: all requests share them


EVERYBODY = Owner()


@dataclass(slots=True)
class HotPrefix:
    """A prefix, and the tokens that it has recently saved."""

    end: Fingerprint  # fingerprint of the last block
    blocks: int  # number of blocks
    token_ids: TokenIds = field(default_factory=lambda: UNKNOWN)  # recorded at the second use
    longest_before: Fingerprint | None = None  # `end` of the longest known prefix inside this one
    uses: float = 0.0  # number of uses, decayed until used_s
    tokens_saved: float = 0.0  # tokens that these uses saved, decayed until used_s
    used_s: float = 0.0  # time of the last use
    owner: Owner = EVERYBODY

    def use(self, tokens: int, now_s: float) -> None:
        """Count a use that saved `tokens` tokens."""
        keep = math.exp((self.used_s - now_s) / MEMORY_S)
        self.uses = keep * self.uses + 1.0
        self.tokens_saved = keep * self.tokens_saved + tokens
        self.used_s = now_s

    def requests_per_s(self, now_s: float) -> float:
        """Return the recent rate of uses."""
        return self.uses * math.exp((self.used_s - now_s) / MEMORY_S) / MEMORY_S

    def tokens_saved_per_s(self, now_s: float) -> float:
        """Return the recent rate of saved tokens."""
        return self.tokens_saved * math.exp((self.used_s - now_s) / MEMORY_S) / MEMORY_S


class HotPrefixes:
    """The prefixes of one router's requests, in bounded memory."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._prefixes: dict[Fingerprint, HotPrefix] = {}  # fingerprint of the last block -> prefix
        self._lengths = Counter[int]()  # number of blocks -> known prefixes of this length

    def record(
        self,
        token_ids: TokenIds,
        chain: Sequence[Fingerprint],
        cached_tokens: int,
        now_s: float,
        features: Sequence[Feature] = (),
        owner: Owner = EVERYBODY,
        shared_tokens: int = 0,
    ) -> None:
        """Count a prompt as a use of the prefixes in its hit.

        Only the text before the first image counts, because named prefixes cannot have images.

        Args:
            chain: fingerprints of the prompt's blocks.
            cached_tokens: leading tokens that came from a cache.
            features: images and the like in the prompt.
            owner: owner of this prompt's prefixes that are longer than `shared_tokens`.
            shared_tokens: leading tokens that all namespaces share.
        """
        text_tokens = features[0].offset if features else cached_tokens
        hit = min(min(text_tokens, cached_tokens) // self._block_size, len(chain))
        if not hit:
            return
        end = chain[hit - 1]
        if end not in self._prefixes:
            is_shared = hit * self._block_size <= shared_tokens
            owner = EVERYBODY if is_shared else owner
            self._prefixes[end] = HotPrefix(end, hit, used_s=now_s, owner=owner)
            self._lengths[hit] += 1
        before: Fingerprint | None = None
        for blocks in sorted(length for length in self._lengths if length <= hit):
            hot = self._prefixes.get(chain[blocks - 1])
            if hot is None:
                continue
            if hot.uses and not len(hot.token_ids):
                hot.token_ids = token_ids[: blocks * self._block_size].copy()
            hot.longest_before, before = before, hot.end
            hot.use(blocks * self._block_size, now_s)
        if len(self._prefixes) > 2 * MAX_PREFIXES:
            self._forget(now_s)

    def top(self, count: int, now_s: float) -> list[HotPrefix]:
        """Return the `count` prefixes that save the most tokens, in descending order.

        Prefixes that were used only once are left out. So are prefixes that are nearly always used
        as a part of one longer prefix.
        """
        # `end` of a prefix -> the most requests per second of a longer prefix that starts with it.
        longer: dict[Fingerprint | None, float] = {}
        for hot in self._prefixes.values():
            uses = hot.requests_per_s(now_s)
            longer[hot.longest_before] = max(longer.get(hot.longest_before, 0.0), uses)
        distinct = [
            hot
            for hot in self._ranked(now_s)
            if len(hot.token_ids)
            and longer.get(hot.end, 0.0) < SAME_USES * hot.requests_per_s(now_s)
        ]
        return distinct[:count]

    def _ranked(self, now_s: float) -> list[HotPrefix]:
        prefixes = self._prefixes.values()
        return sorted(prefixes, key=lambda hot: hot.tokens_saved_per_s(now_s), reverse=True)

    def _forget(self, now_s: float) -> None:
        self._prefixes = {hot.end: hot for hot in self._ranked(now_s)[:MAX_PREFIXES]}
        self._lengths = Counter(hot.blocks for hot in self._prefixes.values())
