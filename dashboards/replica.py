"""The dashboard Replica: one engine, or a few side by side."""

from dashboards import grafana
from dashboards.grafana import Dashboard, Panel, Query, Row
from dashboards.promql import per_second, replica, share


def of_each(gauge: str, what: str = "") -> Query:
    return Query(replica(gauge), f"{{{{replica}}}} {what}".strip())


def rate_of_each(counter: str, what: str = "") -> Query:
    return Query(per_second(replica(counter), "replica"), f"{{{{replica}}}} {what}".strip())


BLOCKS_IN_USE = Query(
    share(replica("kvroute_engine_used_blocks"), replica("kvroute_engine_capacity_blocks")),
    "{{replica}}",
)

WORK = Row(
    "Work",
    (
        Panel(
            "Requests in the engine",
            "In its batch, and waiting for room in it. Waiting ones while the KV cache has room: a "
            "larger `--max-num-seqs`; while it is full: more replicas.",
            grafana.NUMBER,
            (
                of_each("kvroute_engine_running_requests", "in the batch"),
                of_each("kvroute_engine_waiting_requests", "waiting"),
            ),
        ),
        Panel(
            "Prompt tokens",
            "All of them, and those that were cached; the engine computes the difference. Little "
            "cached: see the dashboard Cache hits.",
            grafana.TOKENS_PER_S,
            (
                rate_of_each("kvroute_engine_prompt_tokens_total", "all"),
                rate_of_each("kvroute_engine_cached_tokens_total", "cached"),
            ),
        ),
        Panel(
            "Tokens of answers",
            "What decoding yields. If it falls while the batch does not, long prompts take the "
            "engine's steps, or something else uses its GPU or cores.",
            grafana.TOKENS_PER_S,
            (rate_of_each("kvroute_engine_output_tokens_total"),),
        ),
    ),
)
CACHE = Row(
    "KV cache",
    (
        Panel(
            "Blocks in use",
            "Share of the KV cache that running requests and pins hold; what is left keeps "
            "prefixes. Near 100% there are no hits and requests wait: more replicas, or more "
            "memory.",
            grafana.FRACTION,
            (BLOCKS_IN_USE,),
        ),
        Panel(
            "Blocks stored and evicted",
            "In a second. Equal rates are a full cache at work. Together with much stale in the "
            "ledger, it is too small.",
            grafana.BLOCKS_PER_S,
            (
                rate_of_each("kvroute_engine_stored_blocks_total", "stored"),
                rate_of_each("kvroute_engine_evicted_blocks_total", "evicted"),
            ),
        ),
        Panel(
            "Tokens cached and room for them",
            "What the index should have of the replica, and its capacity. A fall to 0: the cache "
            "was cleared, or the engine began anew.",
            grafana.NUMBER,
            (
                Query(
                    f"{replica('kvroute_publisher_blocks')}"
                    f" * {replica('kvroute_engine_block_tokens')}",
                    "{{replica}} cached",
                ),
                Query(
                    f"{replica('kvroute_engine_capacity_blocks')}"
                    f" * {replica('kvroute_engine_block_tokens')}",
                    "{{replica}} room",
                ),
            ),
        ),
    ),
)
INDEX = Row(
    "Publisher",
    (
        Panel(
            "Lag of its announcements",
            "Age of the oldest change of the cache that Redis does not have. Above some seconds: "
            "Redis is away or slow, or the replica's process has no core.",
            grafana.SECONDS,
            (of_each("kvroute_publisher_lag_seconds"),),
        ),
        Panel(
            "Age of its lease",
            "Seconds since Redis took anything from it. Above 3 s the routers believe that it may "
            "be gone: see whether Redis answers, then the replica's log.",
            grafana.SECONDS,
            (of_each("kvroute_publisher_lease_age_seconds"),),
        ),
        Panel(
            "Announced anew",
            "How often in the time range the started replica wrote all its blocks to Redis again. "
            "0 is good. Often: Redis loses data; `kvroute doctor --audit` says what "
            "differs.",
            grafana.NUMBER,
            (
                Query(
                    f"increase({replica('kvroute_publisher_registrations_total')}[$__range])",
                    "{{replica}}",
                ),
            ),
        ),
    ),
)
PROCESS = Row(
    "Its process (not its engine's)",
    (
        Panel(
            "Cores",
            "CPU seconds in a second. Near 1 the process is the bottleneck of its engine: fewer "
            "requests on each replica, that is more replicas.",
            grafana.NUMBER,
            (rate_of_each("process_cpu_seconds_total"),),
            width=12,
        ),
        Panel(
            "Memory",
            "Resident. It levels off; one that keeps growing for days is a bug to report.",
            grafana.BYTES,
            (of_each("process_resident_memory_bytes"),),
            width=12,
        ),
    ),
)
VLLM = Row(
    "vLLM's own (empty with another engine)",
    (
        Panel(
            "Preemptions",
            "Requests a second that lost their KV blocks to others and are computed again. More "
            "than now and then: a smaller `--max-num-seqs`, more memory for the cache, more "
            "replicas.",
            grafana.REQUESTS_PER_S,
            (rate_of_each("vllm:num_preemptions_total"),),
        ),
        Panel(
            "Time in the engine's queue, p90",
            "From a request's arrival in the engine to its first step. Long: see whether the batch "
            "or the KV cache is full.",
            grafana.SECONDS,
            (
                Query(
                    "histogram_quantile(0.9, "
                    + per_second(replica("vllm:request_queue_time_seconds_bucket"), "le, replica")
                    + ")",
                    "{{replica}}",
                ),
            ),
        ),
        Panel(
            "Prefill, p90",
            "From a request's first step to its first token. Long with few tokens to compute: "
            "other prompts share the steps, or something else uses the GPU.",
            grafana.SECONDS,
            (
                Query(
                    "histogram_quantile(0.9, "
                    + per_second(replica("vllm:request_prefill_time_seconds_bucket"), "le, replica")
                    + ")",
                    "{{replica}}",
                ),
            ),
        ),
    ),
)

REPLICA = Dashboard(
    "kvroute-replica",
    "kvroute / Replica",
    "One engine, or a few side by side: its work, its KV cache, its publisher.",
    (WORK, CACHE, INDEX, PROCESS, VLLM),
)
