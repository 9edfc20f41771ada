"""The dashboard Fleet: its health and its clients' latencies."""

from dashboards import grafana
from dashboards.grafana import Dashboard, Panel, Query, Row, quantiles
from dashboards.promql import per_second, quantile, replica, router, share, total
from dashboards.replica import BLOCKS_IN_USE

REQUESTS = router("kvroute_requests_total")
CACHED = router("kvroute_prompt_tokens_total", 'cause=~"hit|unexpected_hit"')
TTFT = router("kvroute_time_to_first_token_seconds_bucket")
WAITS = router("kvroute_queue_wait_seconds_bucket", 'priority!="batch"')
DEFAULT_LINE = 'line="default"'

NOW = Row(
    "Now",
    (
        Panel(
            "Replicas",
            "Replicas that the routers know of. Fewer than there should be: `kvroute status`, and "
            "the log of the one that is missing; it was lost, or its engine is still starting.",
            grafana.NUMBER,
            (Query(f"max by (model) ({router('kvroute_replicas')})", "{{model}}"),),
            kind="stat",
            steps=grafana.BAD_BELOW_1,
            width=4,
        ),
        Panel(
            "Redis",
            "1 while every router reaches Redis. At 0 requests go on, by what the routers know and "
            "send: bring Redis back; `GET /health` says how long it has been away.",
            grafana.NUMBER,
            (Query(f"min by (model) ({router('kvroute_index_reachable')})", "{{model}}"),),
            kind="stat",
            steps=grafana.BAD_BELOW_1,
            width=4,
        ),
        Panel(
            "Requests",
            "Requests that ended, in a second. None while clients send some: look at the load "
            "balancer, and at `GET /health`.",
            grafana.REQUESTS_PER_S,
            (Query(per_second(REQUESTS), "all"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "First token, p90",
            "Nine in ten requests had their first token within this time. When it is long, see "
            "below whether requests wait in engines (more replicas) or prompts are computed that "
            "were cached before (the dashboard Cache hits).",
            grafana.SECONDS,
            (Query(quantile(0.9, TTFT), "p90"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Hit share",
            "Share of prompt tokens that came from a cache. When it falls, the dashboard Cache "
            "hits says where the others went.",
            grafana.FRACTION,
            (
                Query(
                    share(per_second(CACHED), per_second(router("kvroute_prompt_tokens_total"))),
                    "hits",
                ),
            ),
            kind="stat",
            width=4,
        ),
        Panel(
            "Lost",
            "Requests a second whose replica was lost under them; they go on elsewhere. More than "
            "now and then: a replica keeps dying, and its log says why.",
            grafana.REQUESTS_PER_S,
            (Query(per_second(router("kvroute_requests_total", 'outcome="failed"')), "lost"),),
            kind="stat",
            steps=grafana.BAD_ABOVE_0,
            width=4,
        ),
    ),
    height=4,
)
CLIENTS = Row(
    "What clients feel",
    (
        Panel(
            "Time to the first token",
            "From a request's dispatch to its first token. When all of these rise, there is too "
            "much to compute: more replicas, or more hits. When p99 alone does, long prompts are "
            "behind long prompts, or a replica was lost.",
            grafana.SECONDS,
            quantiles(TTFT, 0.5, 0.9, 0.99),
            width=6,
        ),
        Panel(
            "Time between tokens",
            "From one chunk of an answer to its next. It grows with an engine's batch and with "
            "long prompts among it: more replicas, or a smaller `--max-num-seqs`.",
            grafana.SECONDS,
            quantiles(router("kvroute_inter_token_seconds_bucket"), 0.5, 0.9, 0.99),
            width=6,
        ),
        Panel(
            "Time per output token",
            "Mean over the tokens after the first of each whole answer: how fast it reads. When it "
            "rises and the time between tokens does not, few answers are slow throughout: look for "
            "one slow replica.",
            grafana.SECONDS,
            quantiles(router("kvroute_time_per_output_token_seconds_bucket"), 0.5, 0.9, 0.99),
            width=6,
        ),
        Panel(
            "Whole answers",
            "From a request's dispatch to the end of its answer. Compare with the time to the "
            "first token: what is left is decoding, and grows with the answers' lengths.",
            grafana.SECONDS,
            quantiles(router("kvroute_request_seconds_bucket"), 0.5, 0.9, 0.99),
            width=6,
        ),
    ),
)
QUEUE = Row(
    "The routers' queue",
    (
        Panel(
            "Requests that wait for a replica",
            "In the routers, while every replica has enough to do. filling: batch requests, and "
            "those of tenants that had more than their share; they are there to wait. default: if "
            "these wait for more than moments, more replicas (`kvroute scale`, or a larger "
            "`--max-replicas`).",
            grafana.NUMBER,
            (
                Query(
                    total(router("kvroute_queue_requests"), "line"),
                    "{{line}}",
                ),
            ),
            stacking="normal",
            width=6,
        ),
        Panel(
            "Prefill that waits",
            "Seconds of prefill of those requests. Over the number of replicas, it is about how "
            "long it takes to begin with all of them. When it keeps growing, there is more to do "
            "than the fleet can: requests are refused next.",
            grafana.SECONDS,
            (
                Query(
                    total(router("kvroute_queue_prefill_seconds"), "line"),
                    "{{line}}",
                ),
            ),
            stacking="normal",
            width=6,
        ),
        Panel(
            "Wait in the queue",
            "Of interactive and default requests that had to wait; the oldest is one that waits "
            "now. When p99 alone is long, long prompts let short ones pass. When all are: more "
            "replicas.",
            grafana.SECONDS,
            (
                *quantiles(WAITS, 0.5, 0.9, 0.99),
                Query(
                    f"max ({router('kvroute_queue_oldest_seconds', DEFAULT_LINE)})",
                    "oldest now",
                ),
            ),
            width=6,
        ),
        Panel(
            "Turned away",
            "forecast: requests that would wait longer than they may. deadline: they did. full: "
            "too many wait. no_replica: none is ready, see `kvroute status`. no_seat: sessions "
            "waited too long for a seat, see `kvroute doctor`. For the others: more replicas, or a "
            "larger `--max-wait-s` where clients have the patience.",
            grafana.REQUESTS_PER_S,
            (
                Query(
                    per_second(router("kvroute_queue_refused_requests_total"), "reason"),
                    "{{reason}}",
                ),
            ),
            stacking="normal",
            width=6,
        ),
    ),
)
SEATS = Row(
    "Seats of sessions",
    (
        Panel(
            "Sessions",
            "Sessions need a seat to send while their contexts do not fit in the caches. While "
            "requests wait for one: more replicas, or host memory (`--host-cache-gb`).",
            grafana.NUMBER,
            (
                Query(f"max ({router('kvroute_sessions_active')})", "active"),
                Query(f"max ({router('kvroute_seats_held')})", "with a seat"),
                Query(f"sum ({router('kvroute_sessions_waiting')})", "requests that wait"),
            ),
        ),
        Panel(
            "Wait for a seat",
            "Of requests that had to wait; the oldest is one that waits now. From "
            "`--max-seat-wait-s` on, requests are refused.",
            grafana.SECONDS,
            (
                *quantiles(router("kvroute_seat_wait_seconds_bucket"), 0.5, 0.9),
                Query(f"max ({router('kvroute_seat_oldest_seconds')})", "oldest now"),
            ),
        ),
    ),
)
WORK = Row(
    "Work",
    (
        Panel(
            "Requests by outcome",
            "How requests ended at their replica. failed: it was lost, see its log. moved: it was "
            "full or gone before they came; many of them with few replicas mean overload. refused: "
            "the engine did not take them, see the log. cancelled: the client left, perhaps since "
            "it waited too long.",
            grafana.REQUESTS_PER_S,
            (Query(per_second(REQUESTS, "outcome"), "{{outcome}}"),),
            stacking="normal",
            width=6,
        ),
        Panel(
            "Refused",
            "Errors in place of answers, by code. server_error: see the routers' logs, and whether "
            "a replica is ready. overloaded: more replicas. All others are for the clients to "
            "mend: the error's message says how.",
            grafana.REQUESTS_PER_S,
            (
                Query(
                    per_second(router("kvroute_refused_requests_total"), "code"),
                    "{{code}}",
                ),
            ),
            width=6,
        ),
        Panel(
            "Requests under way",
            "Sent and not ended, and those of them that wait for room in an engine's batch. Many "
            "that wait, for long: more replicas (`kvroute scale`), or a larger `--max-num-seqs` "
            "where the KV caches have room.",
            grafana.NUMBER,
            (
                Query(total(router("kvroute_requests_in_flight")), "under way"),
                Query(total(replica("kvroute_engine_running_requests")), "in a batch"),
                Query(total(replica("kvroute_engine_waiting_requests")), "waiting"),
            ),
            width=6,
        ),
        Panel(
            "Tokens",
            "Prompt tokens that came from a cache, those that were computed, and tokens of "
            "answers. Where computed ones are at what the fleet can do and first tokens are late, "
            "it is full.",
            grafana.TOKENS_PER_S,
            (
                Query(per_second(CACHED), "prompts, cached", "green"),
                Query(
                    per_second(
                        router("kvroute_prompt_tokens_total", 'cause!~"hit|unexpected_hit"')
                    ),
                    "prompts, computed",
                    "orange",
                ),
                Query(per_second(router("kvroute_output_tokens_total")), "answers", "blue"),
            ),
            width=6,
        ),
    ),
)
PROCESSES = Row(
    "Processes",
    (
        Panel(
            "KV blocks in use",
            "Share of each replica's KV cache that running requests and pins hold. Near 100% "
            "requests wait or are computed twice: more replicas, more memory for the cache, or a "
            "smaller `--max-model-len`.",
            grafana.FRACTION,
            (BLOCKS_IN_USE,),
        ),
        Panel(
            "Answering Prometheus",
            "1 for each router and replica that Prometheus could read. 0: the process hangs, or a "
            "firewall keeps Prometheus from its port.",
            grafana.NUMBER,
            (Query(router("up", 'role=~"router|replica"'), "{{role}} {{router}}{{replica}}"),),
        ),
        Panel(
            "Memory",
            "Resident memory of each router, and of each replica without its engine's processes. "
            "It levels off; one that keeps growing for days is a bug to report.",
            grafana.BYTES,
            (
                Query(
                    router("process_resident_memory_bytes", 'role=~"router|replica"'),
                    "{{role}} {{router}}{{replica}}",
                ),
            ),
        ),
    ),
)

FLEET = Dashboard(
    "kvroute-fleet",
    "kvroute / Fleet",
    "Is the fleet well, and do its clients feel well?",
    (NOW, CLIENTS, QUEUE, SEATS, WORK, PROCESSES),
)
