"""The dashboard Replica: one engine, or several engines side by side."""

from dashboards import grafana
from dashboards.grafana import Dashboard, Panel, Query, Row
from dashboards.promql import per_second, replica, share


def of_each(gauge: str, label: str = "") -> Query:
    """Return a query for a gauge of each replica."""
    return Query(replica(gauge), f"{{{{replica}}}} {label}".strip())


def rate_of_each(counter: str, label: str = "") -> Query:
    """Return a query for the growth per second of a counter of each replica."""
    return Query(per_second(replica(counter), "replica"), f"{{{{replica}}}} {label}".strip())


BLOCKS_IN_USE = Query(
    share(replica("kvroute_engine_used_blocks"), replica("kvroute_engine_capacity_blocks")),
    "{{replica}}",
)

WORK = Row(
    "Work",
    (
        Panel(
            "Requests in the engine",
            "Requests in the engine's batch, and requests that wait for it. If requests wait "
            "although the KV cache has space, set a larger `--max-num-seqs`. If the KV cache is "
            "full, add replicas.",
            grafana.NUMBER,
            (
                of_each("kvroute_engine_running_requests", "in the batch"),
                of_each("kvroute_engine_waiting_requests", "waiting"),
            ),
        ),
        Panel(
            "Prompt tokens",
            "All prompt tokens, and the cached tokens among them. The engine computes the "
            "difference. If few tokens are cached, see the dashboard Cache hits.",
            grafana.TOKENS_PER_S,
            (
                rate_of_each("kvroute_engine_prompt_tokens_total", "all"),
                rate_of_each("kvroute_engine_cached_tokens_total", "cached"),
            ),
        ),
        Panel(
            "Tokens of answers",
            "Tokens per second that decoding generates. If they fall while the number of requests "
            "in the batch does not, the engine spends its time on long prompts, or other programs "
            "use its GPU or CPU cores.",
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
            "Share of the KV cache that running requests and pins use. All other blocks can keep "
            "prefixes for later requests. Near 100%, there are few hits, and requests wait: add "
            "replicas or memory.",
            grafana.FRACTION,
            (BLOCKS_IN_USE,),
        ),
        Panel(
            "Blocks stored and evicted",
            "Blocks per second. Equal rates mean that the cache is full, which is normal. If many "
            "tokens are stale or evicted in the ledger as well, the cache is too small.",
            grafana.BLOCKS_PER_S,
            (
                rate_of_each("kvroute_engine_stored_blocks_total", "stored"),
                rate_of_each("kvroute_engine_evicted_blocks_total", "evicted"),
            ),
        ),
        Panel(
            "Cached tokens and capacity",
            "Cached tokens, according to the replica's own table of blocks, and the capacity of "
            "its cache. If the cached tokens fall to 0, the cache was cleared, or the engine has "
            "restarted: see the replica's log.",
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
                    "{{replica}} capacity",
                ),
            ),
        ),
    ),
)
INDEX = Row(
    "Publisher",
    (
        Panel(
            "Publishing lag",
            "Age of the oldest change of the cache that Redis does not have yet. If it is more "
            "than some seconds, Redis is unreachable or slow, or the replica's process has no "
            "free CPU core.",
            grafana.SECONDS,
            (of_each("kvroute_publisher_lag_seconds"),),
        ),
        Panel(
            "Age of the lease",
            "Seconds since Redis accepted a write of the replica. Above 3 s, routers assume that "
            "the replica may be lost: check Redis first, then the replica's log.",
            grafana.SECONDS,
            (of_each("kvroute_publisher_lease_age_seconds"),),
        ),
        Panel(
            "Registrations",
            "How often, in the time range, the replica registered in Redis and wrote all its "
            "blocks there again. It should be 0. If it is high, Redis loses data: `kvroute doctor "
            "--audit` shows the differences.",
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
    "Process of the replica (without the engine's processes)",
    (
        Panel(
            "CPU",
            "CPU seconds per second. Near 1, the replica's process limits its engine: add "
            "replicas, so that each one gets fewer requests.",
            grafana.NUMBER,
            (rate_of_each("process_cpu_seconds_total"),),
            width=12,
        ),
        Panel(
            "Memory",
            "Resident memory. It should become constant. If it keeps growing for days, that is a "
            "bug: please report it.",
            grafana.BYTES,
            (of_each("process_resident_memory_bytes"),),
            width=12,
        ),
    ),
)
VLLM = Row(
    "vLLM's own metrics (empty with another engine)",
    (
        Panel(
            "Preemptions",
            "Requests per second that lost their KV blocks to other requests and are computed "
            "again. If this happens often, set a smaller `--max-num-seqs`, or add memory for the "
            "cache, or add replicas.",
            grafana.REQUESTS_PER_S,
            (rate_of_each("vllm:num_preemptions_total"),),
        ),
        Panel(
            "Time in the engine's queue, p90",
            "Time from a request's arrival in the engine to its first step. If it is long, check "
            "whether the batch or the KV cache is full.",
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
            "Time from a request's first step to its first token. If it is long although few "
            "tokens are computed, other prompts share the steps, or other programs use the GPU: "
            "compare this replica with the others.",
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
    "One engine, or several side by side: requests, KV cache, and publisher.",
    (WORK, CACHE, INDEX, PROCESS, VLLM),
)
