"""The dashboard Fleet: the health of the fleet, and the latencies of its clients."""

from dashboards import grafana
from dashboards.grafana import Dashboard, Panel, Query, Row, quantiles
from dashboards.promql import per_second, quantile, replica, router, share, total
from dashboards.replica import BLOCKS_IN_USE

REQUESTS = router("kvroute_requests_total")
CACHED = router("kvroute_prompt_tokens_total", 'cause=~"hit|pulled|disk|unexpected_hit"')
TTFT = router("kvroute_time_to_first_token_seconds_bucket")
WAITS = router("kvroute_queue_wait_seconds_bucket", 'priority!="batch"')
DEFAULT_LINE = 'line="default"'  # the queue of normal requests, without batch requests

NOW = Row(
    "Now",
    (
        Panel(
            "Replicas",
            "Number of replicas that the routers know. If it is lower than it should be, see "
            "`kvroute status` and the log of the missing replica: it was lost, or its engine is "
            "still starting.",
            grafana.NUMBER,
            (Query(f"max by (model) ({router('kvroute_replicas')})", "{{model}}"),),
            kind="stat",
            steps=grafana.BAD_BELOW_1,
            width=4,
        ),
        Panel(
            "Redis",
            "1 while every router reaches Redis. At 0, requests are still served: routers use "
            "their last copy of the index, and add the blocks of their own requests. Repair Redis; "
            "`GET /health` shows since when it has been unreachable.",
            grafana.NUMBER,
            (Query(f"min by (model) ({router('kvroute_index_reachable')})", "{{model}}"),),
            kind="stat",
            steps=grafana.BAD_BELOW_1,
            width=4,
        ),
        Panel(
            "Requests",
            "Requests that end per second. If none end although clients send requests, check the "
            "load balancer and `GET /health`.",
            grafana.REQUESTS_PER_S,
            (Query(per_second(REQUESTS), "all"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "First token, p90",
            "90% of requests get their first token within this time. If it is long, check below "
            "whether requests wait in engines (add replicas), or whether prompts are computed "
            "that were cached before (dashboard Cache hits).",
            grafana.SECONDS,
            (Query(quantile(0.9, TTFT), "p90"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Hit share",
            "Share of prompt tokens that came from a cache. If it falls, the dashboard Cache hits "
            "shows the causes of the misses.",
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
            "Lost requests",
            "Requests per second whose replica was lost while it ran them. They continue on "
            "another replica. If this happens often, a replica fails repeatedly: see its log for "
            "the reason.",
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
    "Latencies of clients",
    (
        Panel(
            "Time to the first token",
            "Time from a request's dispatch to its first token. If all lines rise, there is too "
            "much prefill: add replicas, or increase cache hits. If only p99 rises, long prompts "
            "wait for other long prompts, or a replica was lost.",
            grafana.SECONDS,
            quantiles(TTFT, 0.5, 0.9, 0.99),
            width=6,
        ),
        Panel(
            "Time between tokens",
            "Time between two chunks of an answer. It grows with the size of an engine's batch, "
            "and with long prompts in the batch: add replicas, or set a smaller `--max-num-seqs`.",
            grafana.SECONDS,
            quantiles(router("kvroute_inter_token_seconds_bucket"), 0.5, 0.9, 0.99),
            width=6,
        ),
        Panel(
            "Time per output token",
            "Mean time per token of an answer, without its first token. If this time rises and "
            "the time between tokens does not, only a few answers are slow: look for one slow "
            "replica.",
            grafana.SECONDS,
            quantiles(router("kvroute_time_per_output_token_seconds_bucket"), 0.5, 0.9, 0.99),
            width=6,
        ),
        Panel(
            "Whole answers",
            "Time from a request's dispatch to the end of its answer. Compare it with the time to "
            "the first token: the difference is decoding, which grows with the length of the "
            "answers.",
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
            "Requests in the routers' queues while all replicas are busy. filling: batch "
            "requests, and requests of tenants that have used more than their share; these are "
            "meant to wait. default: all other requests; if they wait for more than a second, add "
            "replicas (`kvroute scale`, or a larger `--max-replicas`).",
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
            "Queued prefill",
            "Seconds of prefill of all queued requests. Divided by the number of replicas, this "
            "is about the time until the last of these requests starts. If it keeps growing, the "
            "load exceeds the capacity of the fleet, and requests will be refused: add replicas.",
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
            "Wait of interactive and default requests that had to wait, and of the oldest request "
            "in the queue now. If only p99 is long, short prompts overtake long prompts. If all "
            "lines are long, add replicas.",
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
            "Refused from the queue",
            "Requests refused per second, by reason. no_replica: no replica is ready; see `kvroute "
            "status`. no_seat: the session waited too long for a seat; see `kvroute doctor`. "
            "forecast: the request would wait longer than its limit. deadline: it has waited "
            "longer. full: the queue is full. For the last three, add replicas, or set a larger "
            "`--max-wait-s` if clients can wait.",
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
            "Active sessions, sessions with a seat, and requests that wait for a seat. While the "
            "contexts of all active sessions do not fit in the caches, only sessions with a seat "
            "may send requests. If requests wait, add replicas or host memory "
            "(`--host-cache-gb`).",
            grafana.NUMBER,
            (
                Query(f"max ({router('kvroute_sessions_active')})", "active"),
                Query(f"max ({router('kvroute_seats_held')})", "with a seat"),
                Query(f"sum ({router('kvroute_sessions_waiting')})", "requests that wait"),
            ),
        ),
        Panel(
            "Wait for a seat",
            "Wait of requests that had to wait for a seat, and of the request that waits longest "
            "now. Requests are refused after `--max-seat-wait-s`: add replicas or host memory "
            "before that.",
            grafana.SECONDS,
            (
                *quantiles(router("kvroute_seat_wait_seconds_bucket"), 0.5, 0.9),
                Query(f"max ({router('kvroute_seat_oldest_seconds')})", "oldest now"),
            ),
        ),
    ),
)
BATCHES = Row(
    "Batches",
    (
        Panel(
            "Lines of batches",
            "Answered lines of batches, by result. Failed lines are in the error files of their "
            "batches.",
            grafana.REQUESTS_PER_S,
            (Query(per_second(router("kvroute_batch_lines_total"), by="result"), "{{result}}"),),
        ),
        Panel(
            "Prompt tokens of batches",
            "Prompt tokens of batches' lines, computed or from a cache. Put what is common to many "
            "lines at the beginning of their prompts.",
            grafana.TOKENS_PER_S,
            (
                Query(
                    per_second(router("kvroute_batch_prompt_tokens_total"), by="source"),
                    "{{source}}",
                ),
            ),
        ),
        Panel(
            "Batches now",
            "Batches that run, and batches that pause because their files cannot be read or "
            "written: the doctor says why.",
            grafana.NUMBER,
            (
                Query(f"sum ({router('kvroute_batches_running')})", "running"),
                Query(f"sum ({router('kvroute_batches_paused')})", "paused"),
            ),
        ),
        Panel(
            "Time left",
            "Time until the last batch ends at the present speed, and age of the oldest batch. If "
            "this is too long, add replicas.",
            grafana.SECONDS,
            (
                Query(f"max ({router('kvroute_batch_left_seconds')})", "left"),
                Query(f"max ({router('kvroute_batch_oldest_seconds')})", "oldest"),
            ),
        ),
    ),
)
WORK = Row(
    "Work",
    (
        Panel(
            "Requests by outcome",
            "How requests ended at their replica. failed: the replica was lost, see its log. "
            "moved: the replica was full, or was lost before the request arrived; many such "
            "requests mean that the fleet is overloaded. refused: the engine did not accept the "
            "request, see the replica's log. cancelled: the client disconnected, perhaps because "
            "it waited too long.",
            grafana.REQUESTS_PER_S,
            (Query(per_second(REQUESTS, "outcome"), "{{outcome}}"),),
            stacking="normal",
            width=6,
        ),
        Panel(
            "Errors",
            "Errors sent instead of answers, by error code. server_error and unavailable: see the "
            "routers' logs, and check that a replica is ready. overloaded: add replicas. All other "
            "errors must be corrected in the client: the error's message says how.",
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
            "Running requests",
            "running: requests that were sent to a replica and have not ended. in a batch: those "
            "that an engine computes. waiting: those that wait in an engine for space in its "
            "batch. If many wait for long, add replicas (`kvroute scale`), or set a larger "
            "`--max-num-seqs` if the KV caches have space.",
            grafana.NUMBER,
            (
                Query(total(router("kvroute_requests_in_flight")), "running"),
                Query(total(replica("kvroute_engine_running_requests")), "in a batch"),
                Query(total(replica("kvroute_engine_waiting_requests")), "waiting"),
            ),
            width=6,
        ),
        Panel(
            "Tokens",
            "Prompt tokens from a cache, computed prompt tokens, and tokens of answers. If the "
            "computed tokens no longer rise with the load, and first tokens come late, the fleet "
            "is at its limit: add replicas.",
            grafana.TOKENS_PER_S,
            (
                Query(per_second(CACHED), "prompts, cached", "green"),
                Query(
                    per_second(
                        router(
                            "kvroute_prompt_tokens_total", 'cause!~"hit|pulled|disk|unexpected_hit"'
                        )
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
            "Share of each replica's KV cache that running requests and pins use. Near 100%, "
            "requests wait or are preempted and computed again: add replicas or memory for the "
            "cache, or set a smaller `--max-model-len`.",
            grafana.FRACTION,
            (BLOCKS_IN_USE,),
        ),
        Panel(
            "Reached by Prometheus",
            "1 for each router and replica whose metrics Prometheus can read. At 0, the process "
            "hangs, or a firewall blocks its port.",
            grafana.NUMBER,
            (Query(router("up", 'role=~"router|replica"'), "{{role}} {{router}}{{replica}}"),),
        ),
        Panel(
            "Memory",
            "Resident memory of each router, and of each replica without its engine's processes. "
            "It should become constant. If it keeps growing for days, that is a bug: please "
            "report it.",
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
    "Is the fleet healthy, and do clients get fast answers?",
    (NOW, CLIENTS, QUEUE, SEATS, BATCHES, WORK, PROCESSES),
)
