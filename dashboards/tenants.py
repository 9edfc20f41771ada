"""The dashboard Tenants: each tenant's requests and tokens, and what they cost and save."""

from dashboards import grafana
from dashboards.grafana import Dashboard, Panel, Query, Row
from dashboards.promql import in_range, per_second, router, share

REQUESTS = router("kvroute_tenant_requests_total", 'outcome!="failed"')
INCOMPLETE = router("kvroute_tenant_requests_total", 'outcome!="ok"')
PROMPTS = router("kvroute_tenant_prompt_tokens_total")
CACHED = router("kvroute_tenant_prompt_tokens_total", 'cause=~"hit|pulled|disk|unexpected_hit"')
COMPUTED = router("kvroute_tenant_prompt_tokens_total", 'cause!~"hit|pulled|disk|unexpected_hit"')
OUTPUT = router("kvroute_tenant_output_tokens_total")
SPENT = router("kvroute_tenant_gpu_seconds_total")
SAVED = router("kvroute_tenant_gpu_seconds_saved_total")
TENANT = "{{tenant}}"


def per_tenant(counter: str) -> tuple[Query, ...]:
    """Return a query for a counter's growth per second, with one line for each tenant."""
    return (Query(per_second(counter, "tenant"), TENANT),)


def top_tenants(counter: str) -> tuple[Query, ...]:
    """Return a query for the twenty tenants whose counter grew most in the time range."""
    return (Query(f"topk (20, sum by (tenant) ({in_range(counter)}))", TENANT),)


COSTS = Row(
    "GPU time",
    (
        Panel(
            "GPU seconds spent",
            "GPU seconds of each tenant in the whole time range; the twenty tenants with the "
            "most. For invoices, use `kvroute tenants`: it loses no data when a router or "
            "Prometheus restarts.",
            grafana.SECONDS,
            top_tenants(SPENT),
            kind="bargauge",
        ),
        Panel(
            "GPU seconds saved",
            "Seconds of prefill that cached blocks saved for each tenant in the time range. If a "
            "tenant has many requests but saves few seconds, see its hit share below.",
            grafana.SECONDS,
            top_tenants(SAVED),
            kind="bargauge",
        ),
        Panel(
            "GPUs in use",
            "GPU seconds spent per second, that is, how many GPUs each tenant keeps busy. If one "
            "tenant takes most of them, others wait: add replicas, or limit the tenant with "
            "`kvroute keys limit`.",
            grafana.NUMBER,
            per_tenant(SPENT),
            stacking="normal",
        ),
    ),
)
TOKENS = Row(
    "Tokens",
    (
        Panel(
            "Prompt tokens from the cache",
            "Cached prompt tokens of each tenant per second. These cost almost nothing: to get "
            "more of them, let prompts start with the same text.",
            grafana.TOKENS_PER_S,
            per_tenant(CACHED),
            stacking="normal",
        ),
        Panel(
            "Prompt tokens that were computed",
            "Computed prompt tokens of each tenant per second. If they rise while the tenant's "
            "number of requests does not, its prompts have become longer, or start with different "
            "text: see its hit share.",
            grafana.TOKENS_PER_S,
            per_tenant(COMPUTED),
            stacking="normal",
        ),
        Panel(
            "Tokens of answers",
            "Output tokens of each tenant per second. These take most of a GPU's time: check "
            "which `max_tokens` the tenant sets.",
            grafana.TOKENS_PER_S,
            per_tenant(OUTPUT),
            stacking="normal",
        ),
    ),
)
SERVICE = Row(
    "Hits and outcomes",
    (
        Panel(
            "Hit share",
            "Share of each tenant's prompt tokens that came from the cache. If one tenant is far "
            "below the others, its prompts start with text that changes: `kvroute doctor` may "
            "show where.",
            grafana.FRACTION,
            (Query(share(per_second(CACHED, "tenant"), per_second(PROMPTS, "tenant")), TENANT),),
        ),
        Panel(
            "Requests",
            "Requests of each tenant per second; each prompt of a call with several prompts "
            "counts. If the requests of one tenant rise suddenly, its client may be retrying: see "
            "the client's log.",
            grafana.REQUESTS_PER_S,
            per_tenant(REQUESTS),
            stacking="normal",
        ),
        Panel(
            "Incomplete answers",
            "Requests per second without a complete answer, by reason. cancelled: the client "
            "disconnected, often because it waited too long. refused: the engine cannot run the "
            "request; see the error that the client got. failed: the replica was lost; another "
            "replica has continued the answer if possible.",
            grafana.REQUESTS_PER_S,
            (Query(per_second(INCOMPLETE, "tenant, outcome"), "{{tenant}} {{outcome}}"),),
        ),
    ),
)

TENANTS = Dashboard(
    "kvroute-tenants",
    "kvroute / Tenants",
    "Requests and tokens of each tenant with an API key, and what they cost.",
    (COSTS, TOKENS, SERVICE),
)
