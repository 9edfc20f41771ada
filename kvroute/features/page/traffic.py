"""Counts what a router's requests did since the last sample, by replica."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvroute.router.placement.attempts import Attempt, RequestObserver

KEPT = 256  # times of one kind that are kept of one replica in one period


class Times:
    """The times of one period, in seconds. If there are more than KEPT, a random sample of them."""

    def __init__(self, *times_s: float) -> None:
        self.kept_s = list[float]()
        self._added = 0
        for time_s in times_s:
            self.add(time_s)

    def add(self, time_s: float) -> None:
        self._added += 1
        if len(self.kept_s) < KEPT:
            self.kept_s.append(time_s)
        elif (place := random.randrange(self._added)) < KEPT:
            self.kept_s[place] = time_s


@dataclass(slots=True)
class Counts:
    """The sums of one period. A request counts in the period of its first token."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttfts: Times = field(default_factory=Times)  # waits for the first token
    gaps: Times = field(default_factory=Times)  # mean times between two tokens of ended answers


def added(counts: Iterable[Counts]) -> Counts:
    """Return the sum of several replicas' counts."""
    total = Counts()
    for replica in counts:
        total.requests += replica.requests
        total.prompt_tokens += replica.prompt_tokens
        total.cached_tokens += replica.cached_tokens
        total.output_tokens += replica.output_tokens
        total.ttfts.kept_s += replica.ttfts.kept_s
        total.gaps.kept_s += replica.gaps.kept_s
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
        counts.requests += 1
        counts.ttfts.add(attempt.first_token_s - attempt.context.ready_s)
        if attempt.placement is not None and attempt.cached_tokens is not None:
            counts.prompt_tokens += attempt.placement.prompt_tokens
            counts.cached_tokens += attempt.cached_tokens

    def ended(self, attempt: Attempt) -> None:
        _, before = self._in_flight.pop(id(attempt), (attempt, 0))
        counts = self._of(attempt)
        counts.output_tokens += attempt.output_tokens - before
        if (gap_s := attempt.token_gap_s) is not None:
            counts.gaps.add(gap_s)

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
