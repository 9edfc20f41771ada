"""The samples of the live page's charts are right, and bounded."""

import random
from typing import Any

import numpy as np

from kvroute.contract.generation import Chunk
from kvroute.contract.records import ReplicaRecord
from kvroute.features.page.history import (
    REPLICAS,
    SAMPLES,
    History,
    Sample,
    SampledLoad,
    sample,
)
from kvroute.features.page.recorder import Recorder
from kvroute.features.page.traffic import KEPT, Counts, Times, Traffic
from kvroute.router.placement.attempts import Attempt, RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.queueing.queue import Queue, QueuedRequest
from tests.support.records import FACTS, LOAD

NOTHING = sample(Counts(), SampledLoad(), elapsed_s=10.0)


class Router:
    """A router of two replicas, whose requests the traffic counts."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.queue = Queue[None](lambda: 1.0)
        self.fleet = Fleet(
            model="m", revision="", block_size=4, rng=random.Random(0), observer=self.traffic
        )
        self.fleet.update([ReplicaRecord(name, "1", 0, FACTS, LOAD) for name in ("a", "b")])
        self.recorder = Recorder(self.traffic, self.fleet, self.queue)

    def send(self, *, to: str = "a", **context: Any) -> Attempt:
        """A prompt of 10 tokens at the time 1."""
        placement = self.fleet.place(np.arange(10, dtype=np.uint32), ["a", "b"], 1.0)
        return self.fleet.sent(
            placement, to, f"{random.random()}", 1.0, RequestContext(1.0, **context)
        )


def chunk(tokens: int, cached_tokens: int = 0, *, is_last: bool = False) -> Chunk:
    return Chunk((1,) * tokens, cached_tokens, is_last=is_last)


def test_a_request_counts_at_its_first_token_and_its_answer_as_it_is_generated() -> None:
    router = Router()
    attempt = router.send()
    attempt.receive(chunk(2, cached_tokens=8), 1.5)
    first = router.traffic.take()["a"]
    attempt.receive(chunk(5), 2.0)
    attempt.receive(chunk(1, is_last=True), 3.0)
    attempt.end()
    second = router.traffic.take()["a"]
    assert (first.requests, first.prompt_tokens, first.cached_tokens) == (1, 10, 8)
    assert (first.output_tokens, first.ttfts.kept_s, first.gaps.kept_s) == (2, [0.5], [])
    assert (second.requests, second.output_tokens) == (0, 6)
    assert second.gaps.kept_s == [(3.0 - 1.5) / 6]
    assert router.traffic.take() == {}


def test_an_answer_that_goes_on_elsewhere_counts_its_tokens_only() -> None:
    router = Router()
    router.send(is_resumed=True).receive(chunk(3), 1.5)
    counts = router.traffic.take()["a"]
    assert (counts.requests, counts.prompt_tokens, counts.output_tokens) == (0, 0, 3)


def test_of_many_requests_some_times_are_kept() -> None:
    kept_s = Times(*range(3 * KEPT)).kept_s
    assert len({*kept_s}) == KEPT
    assert max(kept_s) >= KEPT


def test_rates_are_per_second() -> None:
    counts = Counts(requests=20, output_tokens=500, ttfts=Times(0.2, 0.1), gaps=Times(0.03))
    one = sample(counts, SampledLoad(), elapsed_s=10.0)
    assert (one.requests_per_s, one.output_tokens_per_s) == (2.0, 50.0)
    assert (one.ttft_p50_s, one.ttft_p90_s) == (0.15, 0.19)
    assert (one.tpot_p50_s, one.tpot_p90_s) == (0.03, 0.03)


def test_the_fleets_sample_is_the_sum_of_its_replicas() -> None:
    router = Router()
    router.queue.add(QueuedRequest(None, arrived_s=1.0, prefill_s=0.5))
    for replica_id, cached_tokens in (("a", 8), ("b", 0)):
        router.send(to=replica_id).receive(chunk(10, cached_tokens), 1.5)
    router.recorder.record(1000.0, elapsed_s=10.0)
    fleet, of_a = (router.recorder.as_json(replica)["samples"] for replica in (None, "a"))
    assert (fleet["at_s"], fleet["requests_per_s"], fleet["queued"]) == ([1000.0], [0.2], [1])
    assert (fleet["cached_tokens"], fleet["prompt_tokens"]) == ([8], [20])
    assert (of_a["cached_tokens"], of_a["prompt_tokens"], of_a["queued"]) == ([8], [10], [None])
    assert fleet["running"] == [2 * LOAD.running]
    assert router.recorder.as_json(None)["replicas"] == ["a", "b"]


def test_a_replica_has_no_values_where_it_was_not_in_the_fleet() -> None:
    history = History()
    history.add(10.0, NOTHING, {"a": NOTHING})
    history.add(20.0, NOTHING, {"b": NOTHING})
    assert history.of_replica("b")["running"] == [None, 0]
    assert history.replicas() == ["a", "b"]


def test_the_history_is_bounded() -> None:
    history = History()
    many: dict[str, Sample] = {f"r{number:04}": NOTHING for number in range(REPLICAS + 50)}
    for number in range(SAMPLES + 5):
        history.add(10.0 * number, NOTHING, many if number == SAMPLES else {})
    columns = history.of_fleet()
    assert {len(values) for values in columns.values()} == {SAMPLES}
    assert columns["at_s"][0] == 50.0
    assert len(history.replicas()) == REPLICAS
