"""A router's Prometheus metrics: latencies, tokens by cause, and the accuracy of its predictions.

No series has a label for a replica, a router or a client: Prometheus adds the scraped process as a
label (targets.py). So the number of series is fixed, except for two for each declared prefix, and
those of tenants (tenant_metrics.py) and of their refusals.
"""

import time
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvroute.blocks.tiers import GPU, SLOWER, TIERS
from kvroute.contract.ranks import replicas_of
from kvroute.contract.unreadable import Unreadable
from kvroute.keys.limits import OTHER
from kvroute.process.exposition import FastHistogram, Readings
from kvroute.router.accounting.accounts import NAMED, named
from kvroute.router.admission.seats import Seats
from kvroute.router.api.errors import ApiError
from kvroute.router.connections.links import Links
from kvroute.router.dispatch.blamed import PoisonList
from kvroute.router.index.feed import Feed
from kvroute.router.observability import seat_metrics
from kvroute.router.observability.audit import Audit
from kvroute.router.observability.queue_metrics import RATIOS, QueueMetrics, export
from kvroute.router.observability.request_log import RequestLog
from kvroute.router.placement.attempts import (
    Attempt,
    Outcome,
    Placement,
    RequestObserver,
    RequestObservers,
)
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.ledger import CAUSES
from kvroute.router.prefixes.catalogue import Catalogue
from kvroute.router.queueing.queue import Queue
from kvroute.router.sessions.returns import WHYS
from kvroute.store.responses import Responses

WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
REQUESTS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
BACKLOGS_S = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
DECISIONS_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.1)
REFUSALS = (
    *("invalid_json", "invalid_value", "unsupported_parameter", "context_length_exceeded"),
    *("model_not_found", "prefix_not_found", "request_too_large", "request_timeout", "overloaded"),
    *("client_left", "previous_response_not_found", "refused_by_engine", "server_error"),
    *("rate_limit_exceeded", "wait_too_long", "no_seat", "replicas_died", "request_blamed"),
)


class Waits(RequestObserver):
    """Latencies as the clients of one router observe them, compared with its predictions."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"kvroute_{name}", documentation, buckets=buckets, registry=registry)

        self._decision = histogram(
            "decision_seconds", "To rank the replicas for a prompt.", DECISIONS_S
        )
        self._backlog = histogram(
            "backlog_seconds",
            "Prefill queued where a request was sent, as the router saw it then.",
            BACKLOGS_S,
        )
        self._first_token = histogram(
            "time_to_first_token_seconds",
            "From a request's arrival, its wait in the queue included, to its first token.",
            WAITS_S,
        )
        self._prediction = histogram(
            "prediction_ratio",
            "Time to the first token at a replica, over what the router predicted.",
            RATIOS,
        )
        self._gap = FastHistogram(
            "kvroute_inter_token_seconds",
            "From one chunk of an answer to its next; answers with n above 1 are left out.",
            GAPS_S,
            registry,
        )
        self._token = histogram(
            "time_per_output_token_seconds",
            "Each token's mean time after the first ones, of whole answers with n = 1.",
            GAPS_S,
        )
        self._answer = histogram(
            "request_seconds", "From a request's arrival to the end of a whole answer.", REQUESTS_S
        )

    def placed(self, placement: Placement, decision_s: float) -> None:
        self._decision.observe(decision_s)

    def first_token(self, attempt: Attempt) -> None:
        assert attempt.placement is not None, "only this router's own attempts have observers"
        assert attempt.first_token_s is not None
        if not attempt.context.is_resumed:
            self._first_token.observe(attempt.first_token_s - attempt.context.at_s)
        self._backlog.observe(attempt.placement.at(attempt.replica_id).backlog_s)
        if predicted_s := attempt.placement.predicted_ttft_s(attempt.replica_id):
            self._prediction.observe((attempt.first_token_s - attempt.sent_s) / predicted_s)

    def next_chunk(self, attempt: Attempt, gap_s: float) -> None:
        if attempt.context.choices == 1:
            self._gap.observe(gap_s)

    def ended(self, attempt: Attempt) -> None:
        if attempt.outcome != "ok" or attempt.first_token_s is None or attempt.last_chunk_s is None:
            return
        self._answer.observe(attempt.last_chunk_s - attempt.context.at_s)
        later_tokens = attempt.output_tokens - attempt.first_tokens
        if attempt.context.choices == 1 and later_tokens:
            self._token.observe((attempt.last_chunk_s - attempt.first_token_s) / later_tokens)


class RequestCounts(RequestObserver):
    """Counts of requests by outcome, and of tokens by cause."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(f"kvroute_{name}", documentation, labels, registry=registry)

        outcomes = counter(
            "requests",
            "Requests sent to a replica, by how they ended there: ok, cancelled, refused, failed "
            "(it was lost; they are sent again), moved (it was full or gone before they came).",
            "outcome",
        )
        self._refusals = counter(
            "refused_requests",
            "Requests that got an error in place of an answer, by its code, whether they came to a "
            "replica or not.",
            "code",
        )
        tokens = counter(
            "prompt_tokens", "Tokens of prompts, by where they came from (the ledger).", "cause"
        )
        evicted = counter(
            "evicted_prompt_tokens",
            "Those of the cause evicted, by why they were gone: ended (their session had), "
            "unlikely (its kind seldom comes back), usual (they were the next in turn, or their "
            "replica is gone).",
            "why",
        )
        tiers = counter(
            "hit_prompt_tokens",
            "Tokens of prompts that came from a cache, by where it was: "
            + ", ".join(["gpu", *(f"or {t.name}: reloaded from {t.label}" for t in SLOWER)])
            + ", as far as the router expected that.",
            "tier",
        )
        # Every label value starts at 0: a rate needs the 0 before the first event.
        self._outcomes = {name: outcomes.labels(name) for name in get_args(Outcome)}
        for code in REFUSALS:
            self._refusals.labels(code)
        self._tokens = {cause: tokens.labels(cause) for cause in CAUSES}
        self._evicted = {why: evicted.labels(why) for why in WHYS}
        self._hits = {tier: tiers.labels(tier.name) for tier in TIERS}
        self._saved_s = {
            tier: counter(
                f"{tier.name}_saved_seconds",
                f"Prefill that blocks in {tier.label} saved, less the wait for their copies, as "
                "the router predicted both.",
            )
            for tier in SLOWER
        }
        self._reusable_tokens = counter(
            "reusable_tokens", "Tokens of those prompts that the best replica had or expected."
        )
        self._output_tokens = counter("output_tokens", "Tokens of answers.")
        self._spilled = counter(
            "spilled_requests", "Requests sent where less of their prompt is cached than elsewhere."
        )
        self._in_flight = Gauge(
            "kvroute_requests_in_flight",
            "Requests sent to a replica and not ended.",
            registry=registry,
        )

    def refused(self, error: Exception) -> None:
        """Count an error that a client gets instead of a response."""
        code = error.code if isinstance(error, ApiError) else None
        self._refusals.labels(code or "server_error").inc()

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
        self._evicted[attempt.evicted_why].inc(ledger.evicted)
        reloaded = attempt.reloaded_tokens
        self._hits[GPU].inc(ledger.hit + ledger.unexpected_hit - sum(reloaded.values()))
        for tier, tokens in reloaded.items():
            self._hits[tier].inc(tokens)
        for tier, saved_s in attempt.saved_s.items():
            self._saved_s[tier].inc(saved_s)
        reusable_tokens = attempt.placement.reusable_tokens
        self._reusable_tokens.inc(reusable_tokens)
        if attempt.placement.expected_tokens(attempt.replica_id) < reusable_tokens:
            self._spilled.inc()


class OverLimit:
    """Counts of requests that a tenant's limits refused."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counter = Counter(
            "kvroute_tenant_refused_requests",
            "Requests refused for a limit of their tenant: requests, prompt_tokens, "
            f"uncached_tokens. Tenants after the first {NAMED} are `{OTHER}`.",
            ("tenant", "limit"),
            registry=registry,
        )
        self._tenants = set[str]()

    def count(self, tenant: str, limit: str) -> None:
        name = named(tenant, self._tenants, most=NAMED)
        self._tenants.add(name)
        self._counter.labels(name, limit).inc()


class RouterMetrics(RequestObservers):
    """One router's metrics of one model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counts = RequestCounts(registry)
        super().__init__(
            Waits(registry), counts, QueueMetrics(registry), seat_metrics.SeatMetrics(registry)
        )
        self.refused = counts.refused
        self.over_limit = OverLimit(registry).count
        self._readings = Readings(registry)

    def export(self, fleet: Fleet, feed: Feed) -> None:
        """Export the state of the fleet and the feed, too."""
        gauge, counter = self._readings.gauge, self._readings.counter
        gauge(
            "kvroute_replicas",
            "Replicas whose lease ran when the router last heard of it.",
            lambda: len(replicas_of(record.id for record in fleet.replicas.records)),
        )
        gauge(
            "kvroute_degraded_replicas",
            "Replicas whose cache is ignored, since they differ from the router.",
            lambda: len(replicas_of(fleet.replicas.degraded)),
        )
        gauge(
            "kvroute_busy_seconds",
            "The fleet's unit of time: what a new request finds left of the prompt that a replica "
            "computes, in the mean. Placement and queue count in it.",
            lambda: fleet.loads.scale.busy_s,
        )
        self._readings.gauge_of(
            "replica",
            "kvroute_replica_slowness",
            "How many times as long as its engine claims a replica computes prompts, as the router "
            "has learned from first tokens.",
            fleet.loads.slowness,
        )
        gauge(
            "kvroute_mirror_blocks",
            "Blocks that the router knows of, counted once however many replicas hold them; those "
            "in host memory apart from those in GPU memory.",
            lambda: feed.state.blocks,
        )
        gauge(
            "kvroute_index_reachable",
            "1 while Redis answers the router, else 0; requests go on without it.",
            lambda: feed.state.is_reachable,
        )
        gauge(
            "kvroute_index_age_seconds",
            "Since what the router knows was last equal to the index.",
            lambda: feed.state.age_s,
        )
        counter("kvroute_index_changes", "Changes read from the index.", lambda: feed.state.changes)
        counter(
            "kvroute_index_loads",
            "Times that a replica's whole set was read: at its start, and after trouble.",
            lambda: feed.state.loads,
        )

    def export_queue(self, queue: Queue[Any]) -> None:
        """Export the requests that wait in the queue now."""
        export(queue, self._readings, time.monotonic)

    def export_seats(self, seats: Seats[Any]) -> None:
        """Export how many sessions hold a seat or wait for one now."""
        seat_metrics.export(seats, self._readings, time.monotonic)

    def export_prefixes(self, catalogue: Catalogue) -> None:
        """One series for each prefix while it is declared, so MAX_PREFIXES bounds them."""
        self._readings.counter_of(
            "prefix",
            "kvroute_prefix_saved_tokens",
            "Tokens of a named prefix that its requests took from a cache.",
            catalogue.saved_tokens,
        )

    def export_audit(self, audit: Audit) -> None:
        self._readings.counter_of(
            "account",
            "kvroute_audit_drift_blocks",
            "Blocks in which audits by this router found an account to be wrong: the replica's of "
            "its engine, Redis's of the replica, or this router's mirror of Redis.",
            lambda: audit.drift,
        )

    def export_unreadable(self, unreadable: Unreadable) -> None:
        self._readings.counter_of(
            "kind",
            "kvroute_unreadable_records",
            "Times that something in Redis, or from another process, was skipped since it cannot "
            "be read: of another version, of another cluster, or garbage.",
            lambda: unreadable.counts,
        )

    def export_blamed(self, blamed: PoisonList) -> None:
        self._readings.counter(
            "kvroute_blamed_requests",
            "Requests that stopped replicas, so that no replica gets them for some minutes.",
            lambda: blamed.added,
        )

    def export_links(self, links: Links) -> None:
        self._readings.gauge(
            "kvroute_connected_replicas",
            "Replicas to which the router has a connection, so that they can get requests.",
            lambda: len(replicas_of(links.connected())),
        )
        self._readings.counter(
            "kvroute_lost_connections",
            "Connections to replicas that ended, for whatever reason.",
            lambda: links.losses,
        )

    def export_responses(self, responses: Responses) -> None:
        self._readings.counter_of(
            "outcome",
            "kvroute_stored_responses",
            "Responses that were to be stored: stored, too_large, known (one has this id already), "
            "failed (Redis is away, slow or full).",
            lambda: responses.counts,
        )
        self._readings.counter(
            "kvroute_evicted_responses",
            "Stored responses that made room for this router's new ones.",
            lambda: responses.evicted,
        )
        self._readings.gauge(
            "kvroute_stored_response_bytes",
            "What all stored responses took in Redis when this router last stored one.",
            lambda: responses.bytes,
        )

    def export_log(self, log: RequestLog) -> None:
        self._readings.counter(
            "kvroute_request_log_dropped_lines",
            "Lines missing in the request log, since the disk is full or slow.",
            lambda: log.dropped,
        )
