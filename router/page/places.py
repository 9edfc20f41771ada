"""Where chats' prompts changed in the last five minutes, and how many cached tokens that lost."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvroute.router.page.recent import BUCKET_S, WINDOW_S
from kvroute.router.placement.attempts import Attempt, RequestObserver
from kvroute.router.sessions.breaks import Break

NEAR = 64  # tokens; two changes this close count as one place
KEPT = 32  # places in one part of the window; losses at further places are not counted here
WORST = 3  # places that the page shows

Key = tuple[str, int]  # role of the place, and its token divided by NEAR


@dataclass(slots=True)
class Place:
    """A place in prompts at which chats changed, and what these changes cost."""

    role: str  # one of chats.PLACES
    token: int  # first token that changed at this place
    kind: str = ""  # kind of the text that changed, as in sessions/volatile.py
    tokens: int = 0  # prompt tokens that could have come from a cache without the change
    requests: int = 0  # requests with a change at this place

    def add(self, token: int, tokens: int, requests: int) -> None:
        self.token = min(self.token, token)
        self.tokens += tokens
        self.requests += requests


class Places(RequestObserver):
    """Lost tokens by place, over the last WINDOW_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[tuple[int, dict[Key, Place]]] = deque()  # oldest first

    def ended(self, attempt: Attempt) -> None:
        broken = attempt.context.broken
        if broken and (ledger := attempt.ledger()) and ledger.broken:
            self.add(broken, ledger.broken)

    def add(self, broken: Break, tokens: int) -> None:
        """Add a request whose changed prompt lost this many cached tokens."""
        now = self._roll()
        if not self._buckets or self._buckets[-1][0] != now:
            self._buckets.append((now, {}))
        places, token = self._buckets[-1][1], broken.difference.token
        if place := _place(places, broken.role, token):
            place.add(token, tokens, 1)
            place.kind = broken.kind or place.kind

    def worst(self) -> list[dict[str, Any]]:
        """Return the places with the most lost tokens, as JSON."""
        self._roll()
        sums: dict[Key, Place] = {}
        for _, places in self._buckets:
            for part in places.values():
                if place := _place(sums, part.role, part.token, limit=KEPT * len(self._buckets)):
                    place.add(part.token, part.tokens, part.requests)
                    place.kind = part.kind or place.kind
        worst = sorted(sums.values(), key=lambda place: -place.tokens)[:WORST]
        return [
            {
                "role": place.role,
                "token": place.token,
                "kind": place.kind,
                "tokens": place.tokens,
                "requests": place.requests,
            }
            for place in worst
        ]

    def _roll(self) -> int:
        """Drop buckets that are too old, and return the number of the current bucket."""
        now = int(self._clock() // BUCKET_S)
        while self._buckets and self._buckets[0][0] <= now - WINDOW_S // BUCKET_S:
            self._buckets.popleft()
        return now


def _place(places: dict[Key, Place], role: str, token: int, *, limit: int = KEPT) -> Place | None:
    """Return the place of the token, which may be a new one; None if there are too many."""
    key = (role, token // NEAR)
    if key not in places and len(places) < limit:
        places[key] = Place(role, token)
    return places.get(key)
