"""Where chats' prompts changed in the last five minutes, and how many cached tokens that lost."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import astuple

from kvroute.router.observability.rolling_window import WINDOW_S, RollingWindow
from kvroute.router.placement.attempts import Attempt, RequestObserver
from kvroute.router.sessions.breaks import Break

NEAR = 64  # tokens; changes in the same stretch of this many tokens count as one place
KEPT = 32  # most places in one part of the window; further places are left out
WORST = 3  # places that operators see

Key = tuple[str, int]  # role of the place, and the number of its stretch of NEAR tokens


@dataclass(slots=True)
class Place:
    """A place in prompts at which chats changed, and what these changes cost."""

    role: str  # see Break
    token: int  # first token that changed at this place
    kind: str = ""  # kind of the text that changed; see Break
    tokens: int = 0  # prompt tokens that could have come from a cache without the change
    requests: int = 0  # requests with a change at this place

    def add(self, token: int, tokens: int, requests: int) -> None:
        """Add changes at this place.

        Args:
            token: first token that these changes have changed.
            tokens: prompt tokens that could have come from a cache without them.
            requests: number of requests with one of these changes.
        """
        self.token = min(self.token, token)
        self.tokens += tokens
        self.requests += requests


@dataclass(slots=True)
class _PlaceSums:
    """The sums of one part of the window."""

    requests: int = 0
    prompt_tokens: int = 0
    lost_tokens: int = 0  # prompt tokens that missed the caches because chats changed
    places: dict[Key, Place] = field(default_factory=dict)


class PromptChanges(RequestObserver):
    """Lost tokens by place, over the last WINDOW_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._window = RollingWindow(clock, _PlaceSums)

    def ended(self, attempt: Attempt) -> None:
        if (ledger := attempt.ledger()) is None:
            return
        sums = self._window.current()
        sums.requests += attempt.outcome != "failed"
        sums.prompt_tokens += sum(astuple(ledger))
        sums.lost_tokens += ledger.broken
        if ledger.broken and (broken := attempt.context.broken):
            self.add(broken, ledger.broken)

    def add(self, broken: Break, tokens: int) -> None:
        """Add a request whose changed prompt lost this many cached tokens."""
        places, token = self._window.current().places, broken.difference.token
        if place := _place(places, broken.role, token):
            place.add(token, tokens, 1)
            place.kind = broken.kind or place.kind

    def as_json(self) -> dict[str, Any]:
        """Return the sums of all parts, and the places with the most lost tokens."""
        parts = self._window.parts()
        return {
            "window_s": WINDOW_S,
            "requests": sum(part.requests for part in parts),
            "prompt_tokens": sum(part.prompt_tokens for part in parts),
            "lost_tokens": sum(part.lost_tokens for part in parts),
            "places": self.worst(),
        }

    def worst(self) -> list[dict[str, Any]]:
        """Return the places with the most lost tokens, as JSON."""
        sums: dict[Key, Place] = {}
        parts = [part.places for part in self._window.parts()]
        for places in parts:
            for part in places.values():
                if place := _place(sums, part.role, part.token, limit=KEPT * len(parts)):
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


def _place(places: dict[Key, Place], role: str, token: int, *, limit: int = KEPT) -> Place | None:
    """Return the place of the token, which may be a new one; None if there are too many."""
    key = (role, token // NEAR)
    if key not in places and len(places) < limit:
        places[key] = Place(role, token)
    return places.get(key)
