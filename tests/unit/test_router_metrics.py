"""The router's metrics of a request, with one or more replicas that answered it."""

import random

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from kvroute.contract.generation import Chunk
from kvroute.contract.keep import EVICTION_REASONS
from kvroute.contract.records import ReplicaRecord
from kvroute.router.observability.metrics import RouterMetrics
from kvroute.router.placement.attempts import Attempt, Outcome, RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.ledger import CAUSES
from tests.support.records import FACTS, LOAD


class RouterWithMetrics:
    """A fleet of two replicas, and its router's metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.fleet = Fleet(
            model="m",
            revision="",
            block_size=4,
            rng=random.Random(0),
            observer=RouterMetrics(self.registry),
        )
        self.fleet.update([ReplicaRecord(name, "1", 0, FACTS, LOAD) for name in "ab"])
        for name in "ab":
            self.fleet.mirror.join(name)

    def send(self, context: RequestContext, to: str = "a", *, at_s: float) -> Attempt:
        """Place a prompt of 10 tokens."""
        placement = self.fleet.place(np.arange(10, dtype=np.uint32), ["a", "b"], at_s)
        return self.fleet.sent(placement, to, "r", at_s, context)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"kvroute_{name}", labels)

    def outcomes(self) -> dict[Outcome, float]:
        return {
            outcome: count
            for outcome in ("ok", "cancelled", "refused", "failed", "moved")
            if (count := self.value("requests_total", outcome=outcome))
        }


def receive(attempt: Attempt, *, at_s: float, is_last: bool = False) -> None:
    attempt.receive(Chunk((1,), 0, is_last), at_s)


def test_an_answer_of_two_replicas_is_one_request_with_one_first_token() -> None:
    router = RouterWithMetrics()
    lost = router.send(RequestContext(100.0), at_s=100.0)
    lost.end("failed")
    second = router.send(RequestContext(100.0), "b", at_s=101.0)
    receive(second, at_s=102.0)
    second.end("failed")
    third = router.send(RequestContext(100.0, is_resumed=True), at_s=103.0)
    for at_s in (104.0, 104.5, 105.0):
        receive(third, at_s=at_s, is_last=at_s == 105.0)
    third.end()
    assert router.outcomes() == {"failed": 2, "ok": 1}
    assert router.value("time_to_first_token_seconds_sum") == 2.0
    assert router.value("time_to_first_token_seconds_count") == 1
    assert router.value("request_seconds_sum") == 5.0
    assert router.value("inter_token_seconds_sum") == 1.0
    assert router.value("time_per_output_token_seconds_sum") == 0.5


def test_a_request_sent_away_from_its_prefix_is_a_spill() -> None:
    router = RouterWithMetrics()
    router.fleet.mirror.add("a", router.fleet.caches.chain(np.arange(10, dtype=np.uint32)))
    attempt = router.send(RequestContext(0.0), "b", at_s=0.0)
    receive(attempt, at_s=1.0, is_last=True)
    attempt.end()
    assert router.value("spilled_requests_total") == 1
    assert router.value("prompt_tokens_total", cause="spilled") == 8
    assert router.value("prompt_tokens_total", cause="tail") == 2


def test_a_request_without_a_token_counts_no_tokens() -> None:
    router = RouterWithMetrics()
    router.send(RequestContext(0.0), at_s=0.0).end("refused")
    assert router.outcomes() == {"refused": 1}
    assert sum(router.value("prompt_tokens_total", cause=cause) or 0 for cause in CAUSES) == 0


@pytest.mark.parametrize("why", EVICTION_REASONS)
def test_evicted_tokens_are_counted_by_reason(why: str) -> None:
    router = RouterWithMetrics()
    chain = router.fleet.caches.chain(np.arange(10, dtype=np.uint32))
    router.fleet.mirror.add("a", chain)
    router.fleet.mirror.remove("a", chain)
    attempt = router.send(RequestContext(0.0, evicted_why=why), at_s=0.0)
    receive(attempt, at_s=1.0, is_last=True)
    attempt.end()
    assert router.value("prompt_tokens_total", cause="evicted") == 8
    tokens = {
        reason: router.value("evicted_prompt_tokens_total", why=reason)
        for reason in EVICTION_REASONS
    }
    assert tokens == {reason: 8 * (reason == why) for reason in EVICTION_REASONS}
