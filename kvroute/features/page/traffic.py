"""Counts what a router's requests did since the last sample, by replica."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvroute.router.placement.attempts import Attempt, RequestObserver

# Times to first token of one replica that are kept in one period. If there are more requests, these
# are a random sample.
KEPT = 256


@dataclass(slots=True)
class Counts:
    """The sums of one period. A request counts in the period of its first token."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)  # waits for the first token

    def answer(self, ttft_s: float) -> None:
        """Count a request that got its first token after `ttft_s`."""
        self.requests += 1
        if len(self.ttfts_s) < KEPT:
            self.ttfts_s.append(ttft_s)
        elif (place := random.randrange(self.requests)) < KEPT:
            self.ttfts_s[place] = ttft_s


def added(counts: Iterable[Counts]) -> Counts:
    """Return the sum of several replicas' counts."""
    total = Counts()
    for replica in counts:
        total.requests += replica.requests
        total.prompt_tokens += replica.prompt_tokens
        total.cached_tokens += replica.cached_tokens
        total.output_tokens += replica.output_tokens
        total.ttfts_s += replica.ttfts_s
    return total


class Traffic(RequestObserver):
    """Counts requests at their first token, and the tokens of answers as they are generated."""

    def __init__(self) -> None:
        self._counts: dict[str, Counts] = {}
        # Requests in flight with the number of their output tokens in earlier periods. The tokens
        # are read once in a period, which costs less than an observer of every chunk.
        self._in_flight: dict[int, tuple[Attempt, int]] = {}

    def sent(self, attempt: Attempt) -> None:
        self._in_flight[id(attempt)] = (attempt, 0)

    def first_token(self, attempt: Attempt) -> None:
        if attempt.first_token_s is None or attempt.context.is_resumed:
            return
        counts = self._of(attempt)
        counts.answer(attempt.first_token_s - attempt.context.ready_s)
        if attempt.placement is not None and attempt.cached_tokens is not None:
            counts.prompt_tokens += attempt.placement.prompt_tokens
            counts.cached_tokens += attempt.cached_tokens

    def ended(self, attempt: Attempt) -> None:
        _, before = self._in_flight.pop(id(attempt), (attempt, 0))
        self._of(attempt).output_tokens += attempt.output_tokens - before

    def take(self) -> dict[str, Counts]:
        """Return the counts by replica since the last call, and begin a new period."""
        for key, (attempt, before) in self._in_flight.items():
            if attempt.output_tokens > before:
                self._of(attempt).output_tokens += attempt.output_tokens - before
                self._in_flight[key] = (attempt, attempt.output_tokens)
        counts, self._counts = self._counts, {}
        return counts

    def _of(self, attempt: Attempt) -> Counts:
        return self._counts.setdefault(attempt.replica_id, Counts())
