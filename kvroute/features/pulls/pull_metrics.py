"""Metrics of the pulls that a router has ordered, with and without a request."""

from typing import get_args

from prometheus_client import CollectorRegistry, Counter

from kvroute.contract.pull import PullResult, Reason
from kvroute.features.pulls.hand_over import HandOver
from kvroute.process.exposition import Readings

COMPLETE = "complete"  # label of pulls that copied all blocks
UNKNOWN = "unknown"  # label of pulls of which no result came, for example of a lost replica
RESULTS = (COMPLETE, *(reason for reason in get_args(Reason) if reason), UNKNOWN)


class PullMetrics:
    """Counts pulls by result, and what they copied."""

    def __init__(self, registry: CollectorRegistry) -> None:
        pulls = Counter(
            "kvroute_pulls",
            "Pulls from another replica's host memory that the router ordered, by result: "
            + ", ".join(RESULTS)
            + ".",
            ["result"],
            registry=registry,
        )
        self._pulls = {result: pulls.labels(result) for result in RESULTS}
        self._tokens = Counter(
            "kvroute_pulled_tokens", "Prompt tokens whose blocks were pulled.", registry=registry
        )
        self._bytes = Counter("kvroute_pulled_bytes", "Bytes that were pulled.", registry=registry)
        self._seconds = Counter(
            "kvroute_pull_seconds",
            "Seconds that pulls took. Bytes divided by these seconds are the speed of the links.",
            registry=registry,
        )

    def count(self, result: PullResult | None) -> None:
        """Count a pull; None: its result is unknown."""
        if result is None:
            self._pulls[UNKNOWN].inc()
            return
        self._pulls[result.reason or COMPLETE].inc()
        self._tokens.inc(result.tokens)
        self._bytes.inc(result.size_bytes)
        self._seconds.inc(result.took_s)


def export(hand_over: HandOver, readings: Readings) -> None:
    """Export what became of the conversations of removed replicas."""
    readings.labelled_counter(
        "result",
        "kvroute_handed_over_prompts",
        "Latest prompts of conversations whose replica was removed, by result: moved (another "
        "replica has pulled the blocks), held (another replica had them already), dropped (the "
        "conversation ended or continued, or the blocks were evicted or are not worth a pull), "
        "late (the time was over).",
        lambda: {str(result): count for result, count in hand_over.outcomes.items()},
    )
    readings.counter(
        "kvroute_handed_over_tokens",
        "Prompt tokens whose blocks other replicas have pulled from removed ones.",
        lambda: hand_over.tokens,
    )
