"""The dashboard Routing: the routers' decisions, their predictions, and the age of the index."""

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
            "Time of one placement decision. If it takes milliseconds, the router's CPU core is "
            "too busy: set a larger `--routers`.",
            grafana.SECONDS,
            quantiles(router("kvroute_decision_seconds_bucket"), 0.5, 0.99),
        ),
        Panel(
            "Requests of each router",
            "Decisions per second. If routers get very different numbers, clients use few, long "
            "connections. This is only a problem when the CPU core of one router is fully used: "
            "then set a larger `--routers`.",
            grafana.REQUESTS_PER_S,
            (Query(per_second(router("kvroute_decision_seconds_count"), "router"), "{{router}}"),),
        ),
        Panel(
            "Spilled",
            "Share of requests that were not sent to the replica with the most cached tokens, "
            "because another replica can start them sooner. This share normally rises with the "
            "load. If it stays high, add replicas.",
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
PREDICTIONS = Row(
    "Predictions",
    (
        Panel(
            "First token, real over predicted",
            "Measured time to first token, divided by the predicted time; 1 is ideal. If the "
            "median is far above 1, other programs use the engines' GPUs or CPU cores. If it is "
            "far below 1, routers have not learned the speed of the replicas yet.",
            grafana.NUMBER,
            quantiles(RATIO, 0.1, 0.5, 0.9),
            width=6,
        ),
        Panel(
            "Wait in the queue, real over forecast",
            "Measured wait in the queue, divided by the forecast wait; 1 is ideal. A router "
            "refuses a request if its forecast wait exceeds `--max-wait-s`. If the median is far "
            "above 1, replicas are slower than routers expect, or routers do not receive each "
            "other's messages. If it is far below 1, requests are refused too early.",
            grafana.NUMBER,
            quantiles(router("kvroute_queue_forecast_ratio_bucket"), 0.1, 0.5, 0.9),
            width=6,
        ),
        Panel(
            "Backlog of the chosen replica",
            "Seconds of prefill that were queued at the chosen replica, as far as the router knew. "
            "If the median is longer than your users should wait, add replicas.",
            grafana.SECONDS,
            quantiles(router("kvroute_backlog_seconds_bucket"), 0.5, 0.9),
            width=6,
        ),
        Panel(
            "Sent again",
            "Requests per second that a replica did not complete, so that they were sent to "
            "another one. moved: the replica was full, or was lost before the request arrived. "
            "failed: the replica was lost while it ran the request; see the dashboard Fleet.",
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
            "The prefill of each replica. If one replica computes far less than the others in a "
            "busy fleet, it is new, slower than the others, or hangs: see its log.",
            grafana.TOKENS_PER_S,
            (Query(COMPUTED, "{{replica}}"),),
        ),
        Panel(
            "Requests of each replica",
            "Requests per second that got their first token. If one replica has most of them, it "
            "has cached the prefix of most requests. This is no problem while requests do not wait "
            "there.",
            grafana.REQUESTS_PER_S,
            (
                Query(
                    per_second(replica("kvroute_engine_requests_total"), "replica"), "{{replica}}"
                ),
            ),
        ),
        Panel(
            "Busiest over average",
            "Prompt tokens computed on the busiest replica, divided by the mean of all replicas. "
            "Near 1, the load is even. If it is above 2 for long while requests wait, declare the "
            "hot prompt as a named prefix, which is cached on as many replicas as needed.",
            grafana.NUMBER,
            (Query(share(f"max ({COMPUTED})", f"avg ({COMPUTED})"), "busiest / average"),),
        ),
    ),
)
INDEX = Row(
    "The index",
    (
        Panel(
            "Age of the index in each router",
            "Seconds since a router's copy of the index was last equal to Redis. If it is more "
            "than some seconds, Redis is unreachable or slow, or the router's CPU core is too "
            "busy.",
            grafana.SECONDS,
            (Query(router("kvroute_index_age_seconds"), "router {{router}}"),),
            width=6,
        ),
        Panel(
            "Publishing lag of each replica",
            "Age of the oldest change of a cache that Redis does not have yet. If it is more than "
            "some seconds, Redis is unreachable or slow, or the replica's process has no free CPU "
            "core.",
            grafana.SECONDS,
            (Query(replica("kvroute_publisher_lag_seconds"), "{{replica}}"),),
            width=6,
        ),
        Panel(
            "Changes and full loads",
            "Changes of the index that routers read per second, and full loads per second, in "
            "which a router reads all blocks of a replica. Full loads are normal for a new replica "
            "and after a problem. If they continue, Redis loses data (check its memory policy and "
            "replication), or routers are too slow.",
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
            "Wrong blocks that audits found per second: in a replica's table compared with its "
            "engine, in Redis compared with the replica, and in a router's copy of the index "
            "compared with Redis. `kvroute doctor --audit` runs an audit; without audits, this is "
            "always 0. kvroute repairs the drift that an audit finds. If it returns, that is a "
            "bug: please report it.",
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
    "The routers' decisions, the quality of their predictions, and the age of their index.",
    (DECISIONS, PREDICTIONS, BALANCE, INDEX),
)
