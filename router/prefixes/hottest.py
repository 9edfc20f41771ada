"""The hottest prefixes of a router's own requests as JSON, each with the start of its text."""

import time
from typing import Any

from kvroute.router.placement.fleet import Fleet
from kvroute.router.prefixes.catalogue import Catalogue
from kvroute.router.prefixes.hot import HotPrefix, HotPrefixes
from kvroute.router.prompts.tokenizer import Prompts

SHOWN = 20  # number of prefixes that are returned
SHOWN_TOKENS = 32  # leading tokens of each prefix that are returned as text


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

        Only prefixes of this tenant and shared prefixes have their text and name.
        """
        now_s = time.monotonic()
        return [self._as_json(hot, tenant, now_s) for hot in self._hot.top(SHOWN, now_s)]

    def _as_json(self, hot: HotPrefix, tenant: str, now_s: float) -> dict[str, Any]:
        owner = hot.owner
        is_visible = owner.tenant in ("", tenant)
        prefix = self._catalogue.declared_as(hot.token_ids, owner.namespace) if is_visible else None
        return {
            "object": "hot_prefix",
            "tokens": len(hot.token_ids),
            "tokens_saved_per_s": round(hot.tokens_saved_per_s(now_s), 3),
            "requests_per_s": round(hot.requests_per_s(now_s), 3),
            "replicas": sorted(self._catalogue.holders(hot.token_ids, owner.namespace)),
            "tenant": owner.tenant or None,
            "prefix_id": prefix and prefix.label,
            "text": self._prompts.decode(hot.token_ids[:SHOWN_TOKENS]) if is_visible else None,
        }
