"""Where chats changed in the last five minutes, and how many prompt tokens that cost a cache."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvroute.router.page.recent import BUCKET_S, WINDOW_S
from kvroute.router.placement.attempts import Attempt, RequestObserver
from kvroute.router.sessions.breaks import Break

NEAR = 64  # tokens; changes so near each other are at one place, as of ids that begin alike
KEPT = 32  # places in a part of the window; what is lost at others is in the ledger only
WORST = 3  # places that are told

Key = tuple[str, int]  # role; token, in steps of NEAR


@dataclass(slots=True)
class Place:
    role: str  # one of chats.PLACES
    token: int  # the first that changed there
    kind: str = ""  # kind of the changed text, see `volatile`
    tokens: int = 0  # lost
    requests: int = 0

    def add(self, token: int, tokens: int, requests: int) -> None:
        self.token = min(self.token, token)
        self.tokens += tokens
        self.requests += requests


class Places(RequestObserver):
    """Sums over the last WINDOW_S, by place."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[tuple[int, dict[Key, Place]]] = deque()  # oldest first

    def ended(self, attempt: Attempt) -> None:
        broken = attempt.context.broken
        if broken and (ledger := attempt.ledger()) and ledger.broken:
            self.add(broken, ledger.broken)

    def add(self, broken: Break, tokens: int) -> None:
        """Add a request that lost this many tokens."""
        now = self._roll()
        if not self._buckets or self._buckets[-1][0] != now:
            self._buckets.append((now, {}))
        places, token = self._buckets[-1][1], broken.difference.token
        if place := _at(places, broken.role, token):
            place.add(token, tokens, 1)
            place.kind = broken.kind or place.kind

    def worst(self) -> list[dict[str, Any]]:
        """Return the places where most was lost, as JSON."""
        self._roll()
        sums: dict[Key, Place] = {}
        for _, places in self._buckets:
            for each in places.values():
                if place := _at(sums, each.role, each.token, most=KEPT * len(self._buckets)):
                    place.add(each.token, each.tokens, each.requests)
                    place.kind = each.kind or place.kind
        found = sorted(sums.values(), key=lambda place: -place.tokens)[:WORST]
        return [
            {
                "role": place.role,
                "token": place.token,
                "kind": place.kind,
                "tokens": place.tokens,
                "requests": place.requests,
            }
            for place in found
        ]

    def _roll(self) -> int:
        """Drop buckets that are too old, and return the number of the current bucket."""
        now = int(self._clock() // BUCKET_S)
        while self._buckets and self._buckets[0][0] <= now - WINDOW_S // BUCKET_S:
            self._buckets.popleft()
        return now


def _at(places: dict[Key, Place], role: str, token: int, *, most: int = KEPT) -> Place | None:
    """Return the place there, a new one if necessary; None if there are too many."""
    key = (role, token // NEAR)
    if key not in places and len(places) < most:
        places[key] = Place(role, token)
    return places.get(key)
