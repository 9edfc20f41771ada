"""The hottest prefixes of a router's own requests as JSON, with a part of their text."""

import time
from typing import Any

from kvroute.contract.generation import TokenIds
from kvroute.router.placement.fleet import Fleet
from kvroute.router.prefixes.catalogue import Catalogue
from kvroute.router.prefixes.differences import differences
from kvroute.router.prefixes.hot import HotPrefix, HotPrefixes
from kvroute.router.prompts.tokenizer import Prompts

SHOWN = 20  # number of prefixes that are returned
SHOWN_TOKENS = 32  # length of each of the two parts of a prefix that are shown as text, in tokens
# Shortest part to show where a prefix differs from others, in tokens. If a prefix differs only in
# its last tokens, the part starts before the difference.
LEAST_TOKENS = 8
# These characters are removed from the start of that part: they belong to the text before it.
LEFT_OVER = " .,;:!?·"


class Hottest:
    """Describes the hottest prefixes for the API and the live page."""

    def __init__(
        self, hot: HotPrefixes, fleet: Fleet, catalogue: Catalogue, prompts: Prompts
    ) -> None:
        self._hot = hot
        self._fleet = fleet
        self._catalogue = catalogue
        self._prompts = prompts

    def top(self, tenant: str = "") -> list[dict[str, Any]]:
        """Return the prefixes that save the most tokens, in descending order.

        The tenant may read the text of its own prefixes and of those that all tenants share. Only
        these are compared with each other, since a comparison with another tenant's prefix would
        reveal a part of its text.
        """
        now_s = time.monotonic()
        hottest = self._hot.top(SHOWN, now_s)
        visible = [hot for hot in hottest if hot.owner.tenant in ("", tenant)]
        differ_at = differences([hot.token_ids for hot in visible])
        texts = {
            hot.end: self._texts(hot, shared)
            for hot, shared in zip(visible, differ_at, strict=True)
        }
        return [self._as_json(hot, now_s) | texts.get(hot.end, HIDDEN) for hot in hottest]

    def _as_json(self, hot: HotPrefix, now_s: float) -> dict[str, Any]:
        holders = self._catalogue.holders(hot.token_ids, hot.owner.namespace)
        return {
            "object": "hot_prefix",
            "tokens": len(hot.token_ids),
            "tokens_saved_per_s": round(hot.tokens_saved_per_s(now_s), 3),
            "requests_per_s": round(hot.requests_per_s(now_s), 3),
            "replicas": sorted(holders),
            "tenant": hot.owner.tenant or None,
        }

    def _texts(self, hot: HotPrefix, shared: int) -> dict[str, Any]:
        """Return the prefix's name, its first words, and the words where it differs from others.

        Args:
            shared: leading tokens that the prefix shares with the most similar other one.
        """
        prefix = self._catalogue.declared_as(hot.token_ids, hot.owner.namespace)
        return {
            "prefix_id": prefix and prefix.label,
            "text": self._prompts.decode(hot.token_ids[:SHOWN_TOKENS]),
            "differs_at": shared,
            "differing_text": self._plain(hot.token_ids, shared),
        }

    def _plain(self, token_ids: TokenIds, begin: int) -> str:
        """Return the text of SHOWN_TOKENS tokens from `begin`, without the chat template's part."""
        begin = max(0, min(begin, len(token_ids) - LEAST_TOKENS))
        before = int(token_ids[begin - 1]) if begin else None
        text = self._prompts.plain_text(token_ids[begin : begin + SHOWN_TOKENS], before)
        return text.lstrip(LEFT_OVER) if begin else text


# Instead of `_texts`, for prefixes of other tenants.
HIDDEN = {"prefix_id": None, "text": None, "differs_at": None, "differing_text": None}
