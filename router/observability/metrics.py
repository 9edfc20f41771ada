"""A router's Prometheus metrics: latencies, tokens by cause, and the accuracy of its predictions.

Most labels have a fixed set of values. The values of three labels come from clients or from the
fleet, and their number is limited: replicas, declared prefixes and tenants. Prometheus adds the
scraped process as a label (targets.py).
"""

import time
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvroute.blocks.tiers import GPU, PEER, SLOWER, TIERS
from kvroute.contract.keep import EVICTION_REASONS
from kvroute.contract.ranks import replicas_of
from kvroute.contract.unreadable import Unreadable
from kvroute.features import ALL_CODES
from kvroute.process.exposition import FastHistogram, Readings
from kvroute.router.api.errors import ApiError
from kvroute.router.connections.links import Links
from kvroute.router.dispatch.blamed import PoisonList
from kvroute.router.index.feed import Feed
from kvroute.router.observability.observers import RequestObservers
from kvroute.router.observability.queue_metrics import RATIOS, QueueMetrics, export
from kvroute.router.observability.request_log import RequestLog
from kvroute.router.placement.attempts import (
    Attempt,
    Outcome,
    Placement,
    RequestObserver,
)
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.ledger import CAUSES
from kvroute.router.placement.replicas import own_degraded
from kvroute.router.queueing.queue import Queue

# Upper bounds of histogram buckets, in seconds.
WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
REQUESTS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
BACKLOGS_S = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
DECISIONS_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.1)
REFUSED_BY_ENGINE = "refused_by_engine"  # label in place of a code: a replica sent the error
REFUSALS = (*ALL_CODES, REFUSED_BY_ENGINE)  # values of the label `code`


class Waits(RequestObserver):
    """Latencies as one router's clients observe them, compared with the router's predictions."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"kvroute_{name}", documentation, buckets=buckets, registry=registry)

        self._decision = histogram(
            "decision_seconds", "Time that the router took to rank the replicas.", DECISIONS_S
        )
        self._backlog = histogram(
            "backlog_seconds",
            "Prefill queued at the chosen replica when a request was placed, as predicted by the "
            "router.",
            BACKLOGS_S,
        )
        self._first_token = histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival to its first token, including its wait in the queue.",
            WAITS_S,
        )
        self._prediction = histogram(
            "prediction_ratio",
            "Time to the first token at a replica, divided by the router's prediction.",
            RATIOS,
        )
        self._gap = FastHistogram(
            "kvroute_inter_token_seconds",
            "Time between two chunks of an answer. Requests with n above 1 are not counted.",
            GAPS_S,
            registry,
        )
        self._token = histogram(
            "time_per_output_token_seconds",
            "Mean time per token after the first chunk, for complete answers with n = 1.",
            GAPS_S,
        )
        self._answer = histogram(
            "request_seconds", "Time from a request's arrival to its complete answer.", REQUESTS_S
        )

    def placed(self, placement: Placement, decision_s: float) -> None:
        self._decision.observe(decision_s)

    def first_token(self, attempt: Attempt) -> None:
        assert attempt.placement is not None, "observers see attempts of this router only"
        assert attempt.first_token_s is not None
        if not attempt.context.is_resumed:
            self._first_token.observe(attempt.first_token_s - attempt.context.ready_s)
        self._backlog.observe(attempt.placement.candidate(attempt.replica_id).backlog_s)
        if predicted_s := attempt.placement.predicted_ttft_s(attempt.replica_id):
            self._prediction.observe((attempt.first_token_s - attempt.sent_s) / predicted_s)

    def next_chunk(self, attempt: Attempt, gap_s: float) -> None:
        if attempt.context.choices == 1:
            self._gap.observe(gap_s)

    def ended(self, attempt: Attempt) -> None:
        if attempt.outcome != "ok" or attempt.first_token_s is None or attempt.last_chunk_s is None:
            return
        self._answer.observe(attempt.last_chunk_s - attempt.context.ready_s)
        if (gap_s := attempt.token_gap_s) is not None:
            self._token.observe(gap_s)


class RequestCounts(RequestObserver):
    """Counts of requests by outcome, and of tokens by cause."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(f"kvroute_{name}", documentation, labels, registry=registry)

        outcomes = counter(
            "requests",
            "Requests sent to a replica, by outcome: ok, cancelled, refused, failed (the replica "
            "was lost; the request is sent again), moved (the replica was full, was lost before "
            "the request arrived, or did not start it).",
            "outcome",
        )
        self._refusals = counter(
            "refused_requests",
            "Requests that got an error instead of an answer, from a router or a replica, by the "
            "error's code. The code refused_by_engine counts all errors of replicas.",
            "code",
        )
        tokens = counter(
            "prompt_tokens",
            "Prompt tokens by cause: tokens from a cache, and reasons why others were computed.",
            "cause",
        )
        evicted = counter(
            "evicted_prompt_tokens",
            "Prompt tokens with the cause evicted, by reason: ended (their session had ended), "
            "unlikely (a return of their session was unlikely), usual (they were the least "
            "recently used, or their replica was lost).",
            "why",
        )
        tiers = counter(
            "hit_prompt_tokens",
            "Prompt tokens from a cache, by tier: gpu"
            + "".join(f", {t.name} (reloaded from {t.label}, as predicted)" for t in SLOWER)
            + f", {PEER.name} (pulled from {PEER.label}).",
            "tier",
        )
        # All series start at 0, so that Prometheus's rate() includes the first event.
        self._outcomes = {name: outcomes.labels(name) for name in get_args(Outcome)}
        for code in REFUSALS:
            self._refusals.labels(code)
        self._tokens = {cause: tokens.labels(cause) for cause in CAUSES}
        self._evicted = {why: evicted.labels(why) for why in EVICTION_REASONS}
        self._hits = {tier: tiers.labels(tier.name) for tier in (*TIERS, PEER)}
        self._saved_s = {
            tier: counter(
                f"{tier.name}_saved_seconds",
                f"Seconds of prefill saved by blocks in {tier.label}, minus the time to copy them, "
                "as predicted by the router.",
            )
            for tier in (*SLOWER, PEER)
        }
        self._reusable_tokens = counter(
            "reusable_tokens",
            "Prompt tokens cached, or about to be cached, on the replica that had the most of "
            "them.",
        )
        self._output_tokens = counter("output_tokens", "Output tokens.")
        self._spilled = counter(
            "spilled_requests",
            "Requests sent to a replica with less of their prompt cached than another replica.",
        )
        self._in_flight = Gauge(
            "kvroute_requests_in_flight",
            "Requests that are running at a replica or queued there.",
            registry=registry,
        )

    def refused(self, error: Exception) -> None:
        """Count an error that a client gets instead of a response."""
        code = error.code if isinstance(error, ApiError) else None
        self._refusals.labels(code or "server_error").inc()

    def refused_by_engine(self) -> None:
        """Count an error of a replica that a client gets instead of a response."""
        self._refusals.labels(REFUSED_BY_ENGINE).inc()

    def sent(self, attempt: Attempt) -> None:
        self._in_flight.inc()

    def ended(self, attempt: Attempt) -> None:
        self._in_flight.dec()
        self._outcomes[attempt.outcome or "ok"].inc()
        self._output_tokens.inc(attempt.output_tokens)
        if (ledger := attempt.ledger()) is None or attempt.placement is None:
            return
        for cause, tokens in msgspec.structs.asdict(ledger).items():
            self._tokens[cause].inc(tokens)
        self._evicted[attempt.context.evicted_why].inc(ledger.evicted)
        reloaded = attempt.reloaded_tokens
        self._hits[GPU].inc(ledger.cached - sum(reloaded.values()))
        for tier, tokens in reloaded.items():
            self._hits[tier].inc(tokens)
        for tier, saved_s in attempt.saved_s.items():
            self._saved_s[tier].inc(saved_s)
        reusable_tokens = attempt.placement.reusable_tokens
        self._reusable_tokens.inc(reusable_tokens)
        if attempt.placement.expected_tokens(attempt.replica_id) < reusable_tokens:
            self._spilled.inc()


class RouterMetrics(RequestObservers):
    """One router's metrics of one model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counts = RequestCounts(registry)
        super().__init__(Waits(registry), counts, QueueMetrics(registry))
        self.refused_by_engine = counts.refused_by_engine
        self._readings = Readings(registry)

    def export(self, fleet: Fleet, feed: Feed) -> None:
        """Export the state of the fleet, and of the feed that reads the index."""
        gauge, counter = self._readings.gauge, self._readings.counter
        gauge(
            "kvroute_replicas",
            "Replicas with a valid lease when the router last read the index.",
            lambda: len(replicas_of(record.id for record in fleet.replicas.records)),
        )
        gauge(
            "kvroute_degraded_replicas",
            "Replicas whose cache is ignored, since their engine or tokenizer differs from the "
            "router's.",
            lambda: len(replicas_of(own_degraded(fleet.replicas))),
        )
        gauge(
            "kvroute_busy_seconds",
            "The fleet's unit of time for placement and queue: the mean time until a replica has "
            "finished the prompt that it is computing when a request arrives.",
            lambda: fleet.loads.scale.busy_s,
        )
        self._readings.labelled_gauge(
            "replica",
            "kvroute_replica_slowness",
            "A replica's measured prefill time divided by the time predicted from its engine's "
            "reported speed; learned from first tokens.",
            fleet.loads.slowness,
        )
        gauge(
            "kvroute_mirror_blocks",
            "Different blocks that the router knows at any replica. A block in both GPU and host "
            "memory counts twice.",
            lambda: feed.state.blocks,
        )
        gauge(
            "kvroute_index_reachable",
            "1 while Redis answers the router, else 0. Requests are also served without Redis.",
            lambda: feed.state.is_reachable,
        )
        gauge(
            "kvroute_index_age_seconds",
            "Time since the router's mirror was last equal to the index.",
            lambda: feed.state.age_s,
        )
        counter("kvroute_index_changes", "Changes read from the index.", lambda: feed.state.changes)
        counter(
            "kvroute_index_loads",
            "Times that the whole list of a replica's blocks was read: at its start and after "
            "errors.",
            lambda: feed.state.loads,
        )

    def export_queue(self, queue: Queue[Any]) -> None:
        """Export the current state of the queue."""
        export(queue, self._readings, time.monotonic)

    @property
    def readings(self) -> Readings:
        """Return the metrics that are read at scrape time, to add further ones."""
        return self._readings

    def export_unreadable(self, unreadable: Unreadable) -> None:
        """Export how many records and messages could not be decoded."""
        self._readings.labelled_counter(
            "kind",
            "kvroute_unreadable_records",
            "Records in Redis and messages of other processes that were skipped because they could "
            "not be read: another version, another cluster, or corrupt.",
            lambda: unreadable.counts,
        )

    def export_blamed(self, blamed: PoisonList) -> None:
        """Export how many requests the router has blamed."""
        self._readings.counter(
            "kvroute_blamed_requests",
            "Requests blamed for the loss of replicas, which are rejected for some minutes.",
            lambda: blamed.added,
        )

    def export_links(self, links: Links) -> None:
        """Export the number of connections to replicas, and of lost connections."""
        self._readings.gauge(
            "kvroute_connected_replicas",
            "Replicas to which the router has a connection.",
            lambda: len(replicas_of(links.connected())),
        )
        self._readings.counter(
            "kvroute_lost_connections",
            "Connections to replicas that ended for any reason.",
            lambda: links.losses,
        )

    def export_log(self, log: RequestLog) -> None:
        """Export how many lines the request log has dropped."""
        self._readings.counter(
            "kvroute_request_log_dropped_lines",
            "Lines missing in the request log because the disk is full or slow.",
            lambda: log.dropped,
        )
