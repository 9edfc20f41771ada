"""The hottest prefixes of a router's own requests, as people see them."""

import time
from typing import Any

from router.api.prompt import Prompts
from router.named.hot import Hot, HotPrefixes
from router.named.prefixes import Catalogue
from router.routing.fleet import Fleet

SHOWN = 20  # prefixes
SHOWN_TOKENS = 32  # of each, as text


class Hottest:
    """What there is to tell of the hottest prefixes."""

    def __init__(
        self, hot: HotPrefixes, fleet: Fleet, catalogue: Catalogue, prompts: Prompts
    ) -> None:
        self._hot = hot
        self._fleet = fleet
        self._catalogue = catalogue
        self._prompts = prompts

    def top(self) -> list[dict[str, Any]]:
        """Those that save most, best first."""
        now_s = time.monotonic()
        return [self._shown(hot, now_s) for hot in self._hot.top(SHOWN, now_s)]

    def _shown(self, hot: Hot, now_s: float) -> dict[str, Any]:
        prefix = self._catalogue.declared_as(hot.token_ids)
        return {
            "object": "hot_prefix",
            "tokens": len(hot.token_ids),
            "tokens_saved_per_s": round(hot.tokens_saved_per_s(now_s), 3),
            "requests_per_s": round(hot.requests_per_s(now_s), 3),
            "replicas": sorted(self._fleet.holders(hot.token_ids)),
            "prefix_id": prefix and prefix.id,
            "text": self._prompts.decode(hot.token_ids[:SHOWN_TOKENS]),
        }
