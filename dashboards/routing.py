"""The dashboard Routing: the routers' choices, the quality of predictions, and the index's age."""

from dashboards import grafana
from dashboards.grafana import Dashboard, Panel, Query, Row, quantiles
from dashboards.promql import per_second, replica, router, share

RATIO = router("kvroute_prediction_ratio_bucket")
COMPUTED = (
    f"({per_second(replica('kvroute_engine_prompt_tokens_total'), 'replica')}"
    f" - {per_second(replica('kvroute_engine_cached_tokens_total'), 'replica')})"
)

DECISIONS = Row(
    "Decisions",
    (
        Panel(
            "Time to rank the replicas",
            "For one prompt. Milliseconds mean that a router's core is too busy: more `--routers`.",
            grafana.SECONDS,
            quantiles(router("kvroute_decision_seconds_bucket"), 0.5, 0.99),
        ),
        Panel(
            "Requests of each router",
            "Decisions in a second. Routers that get very different numbers: clients keep few, "
            "long connections; that costs nothing until a router's core is full.",
            grafana.REQUESTS_PER_S,
            (Query(per_second(router("kvroute_decision_seconds_count"), "router"), "{{router}}"),),
        ),
        Panel(
            "Spilled",
            "Share of requests that went where less of their prompt is cached than elsewhere, "
            "since that is sooner. Rising with load is right; if it stays high, add replicas.",
            grafana.FRACTION,
            (
                Query(
                    share(
                        per_second(router("kvroute_spilled_requests_total")),
                        per_second(router("kvroute_decision_seconds_count")),
                    ),
                    "spilled",
                ),
            ),
        ),
    ),
)
FORESIGHT = Row(
    "Foresight",
    (
        Panel(
            "First token, real over predicted",
            "1 is right. A median far above: something that the routers do not know takes the "
            "engines' time, such as other users of the GPUs or of the cores. Far below: the "
            "routers have not learned the replicas' speed yet.",
            grafana.NUMBER,
            quantiles(RATIO, 0.1, 0.5, 0.9),
            width=6,
        ),
        Panel(
            "Wait in the queue, real over forecast",
            "1 is right; requests are refused by this forecast. A median far above: replicas are "
            "slower than the routers believe, or other routers are not heard. Far below: requests "
            "are refused too early.",
            grafana.NUMBER,
            quantiles(router("kvroute_queue_forecast_ratio_bucket"), 0.1, 0.5, 0.9),
            width=6,
        ),
        Panel(
            "Backlog where requests went",
            "Seconds of prefill queued there before them, as the router saw it. When the median is "
            "above what your users may wait, add replicas.",
            grafana.SECONDS,
            quantiles(router("kvroute_backlog_seconds_bucket"), 0.5, 0.9),
            width=6,
        ),
        Panel(
            "Sent again",
            "Requests that a replica did not answer. moved: it was full or gone when they came. "
            "failed: it was lost; see which, in the dashboard Fleet.",
            grafana.REQUESTS_PER_S,
            (
                Query(
                    per_second(
                        router("kvroute_requests_total", 'outcome=~"moved|failed"'), "outcome"
                    ),
                    "{{outcome}}",
                ),
            ),
            stacking="normal",
            width=6,
        ),
    ),
)
BALANCE = Row(
    "Balance",
    (
        Panel(
            "Prompt tokens computed on each replica",
            "The work that is shared out. One that has much less than the others in a busy fleet: "
            "it is new, slower, or hangs.",
            grafana.TOKENS_PER_S,
            (Query(COMPUTED, "{{replica}}"),),
        ),
        Panel(
            "Requests of each replica",
            "First tokens in a second. One that has most of them holds what most requests begin "
            "with; while they do not wait there that is as it should be.",
            grafana.REQUESTS_PER_S,
            (
                Query(
                    per_second(replica("kvroute_engine_requests_total"), "replica"), "{{replica}}"
                ),
            ),
        ),
        Panel(
            "Busiest over average",
            "Prompt tokens computed on the busiest replica, over the mean of all. Near 1 is even. "
            "Above 2 for long while requests wait: declare what is hot as a named prefix, which "
            "spreads over as many replicas as it needs.",
            grafana.NUMBER,
            (Query(share(f"max ({COMPUTED})", f"avg ({COMPUTED})"), "busiest / average"),),
        ),
    ),
)
INDEX = Row(
    "What routers know",
    (
        Panel(
            "Age of the index in each router",
            "Seconds since what a router knows was last equal to Redis. Above some seconds: Redis "
            "is away or slow, or the router's core is too busy.",
            grafana.SECONDS,
            (Query(router("kvroute_index_age_seconds"), "router {{router}}"),),
            width=6,
        ),
        Panel(
            "Lag of each replica's announcements",
            "Age of the oldest change of a cache that Redis does not have. Above some seconds: "
            "Redis is away or slow, or the replica's process has no core.",
            grafana.SECONDS,
            (Query(replica("kvroute_publisher_lag_seconds"), "{{replica}}"),),
            width=6,
        ),
        Panel(
            "Changes read, replicas loaded anew",
            "In a second. A replica's whole set is read when it comes, and after trouble: loads "
            "that go on mean that Redis loses data (its memory policy, its replication) "
            "or that routers cannot keep up.",
            grafana.NUMBER,
            (
                Query(
                    per_second(router("kvroute_index_changes_total"), "router"),
                    "router {{router}} changes",
                ),
                Query(
                    per_second(router("kvroute_index_loads_total"), "router"),
                    "router {{router}} loads",
                ),
            ),
            width=6,
        ),
        Panel(
            "Drift that audits found",
            "Wrong blocks per second: in a replica's table compared with its engine, in Redis "
            "compared with the replica, in a router's mirror compared with Redis. Also 0 without "
            "any audit: "
            "`kvroute doctor --audit`. What is found is put right; drift that comes again is a bug "
            "to report.",
            grafana.BLOCKS_PER_S,
            (
                Query(
                    per_second(router("kvroute_audit_drift_blocks_total"), "account"),
                    "{{account}}",
                ),
            ),
            width=6,
        ),
    ),
)

ROUTING = Dashboard(
    "kvroute-routing",
    "kvroute / Routing",
    "The routers' choices, the quality of their predictions, and the age of their index.",
    (DECISIONS, FORESIGHT, BALANCE, INDEX),
)
