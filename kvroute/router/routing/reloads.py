"""What it takes a replica to reload blocks from host memory: its claim, corrected by first tokens.

A reload delays its own request and takes none of the GPU's time. The observed time is that to the
first token, less what computing the rest should have taken. So it is only known of requests that
had the replica to themselves.
"""

import math
from dataclasses import dataclass, field

from kvroute.contract.speed import Speed

PRIOR_S = 0.05  # weight of the claim itself, in seconds of reloading
MEMORY_S = 2.0  # claimed seconds of reloading after which an observation's weight is 1/e
FADE_S = 300.0  # without any reload; then a slow one is tried again
LEAST, MOST = 0.1, 10.0  # bounds of one observation, in times of the estimate


@dataclass(frozen=True, slots=True)
class Reload:
    """A part of a prompt that is in host memory and not in the GPU's."""

    begin: int  # this and the next: tokens of the prompt
    end: int
    claimed_s: float  # to reload all of it, as the replica claims

    def part_s(self, cached_tokens: int) -> float:
        """As claimed, for what the engine took of it if it has taken so many of the prompt."""
        reloaded = max(0, min(cached_tokens, self.end) - self.begin)
        return self.claimed_s * reloaded / (self.end - self.begin)


@dataclass(slots=True)
class Reloads:
    """One replica's, as this router knows them."""

    speed: Speed = field(default_factory=lambda: Speed(PRIOR_S, PRIOR_S, MEMORY_S))
    _waiting: set[str] = field(default_factory=set)  # request ids
    _end_s: float = -math.inf  # when those under way should be over
    _used_s: float = -math.inf  # when the latest one began

    def seconds(self, claimed_s: float, now_s: float) -> float:
        """What a reload will take by itself."""
        return claimed_s * self._slowness(now_s)

    def wait_s(self, now_s: float) -> float:
        """Until those under way are over."""
        return max(0.0, self._end_s - now_s)

    def begin(self, request_id: str, reload: Reload, now_s: float) -> None:
        self._end_s = max(self._end_s, now_s) + self.seconds(reload.claimed_s, now_s)
        self._waiting.add(request_id)
        self._used_s = now_s

    def end(self, request_id: str) -> None:
        """Its first token came, or will not come."""
        self._waiting.discard(request_id)
        if not self._waiting:
            self._end_s = -math.inf

    def learn(self, claimed_s: float, observed_s: float, now_s: float) -> None:
        estimate_s = self.seconds(claimed_s, now_s)
        self.speed.learn(claimed_s, min(max(observed_s, LEAST * estimate_s), MOST * estimate_s))

    def _slowness(self, now_s: float) -> float:
        """A replica where reloads were slow gets none: so what was learned of it has to fade."""
        extra = self.speed.slowness - 1.0
        if extra <= 0.0:
            return self.speed.slowness
        return 1.0 + extra * math.exp((self._used_s - now_s) / FADE_S)
