"""The dashboard Tenants: what each tenant asks for, and what that costs and saves."""

from dashboards import grafana
from dashboards.grafana import Dashboard, Panel, Query, Row
from dashboards.promql import in_range, per_second, router, share

REQUESTS = router("kvroute_tenant_requests_total", 'outcome!="failed"')
ENDED_BADLY = router("kvroute_tenant_requests_total", 'outcome!="ok"')
PROMPTS = router("kvroute_tenant_prompt_tokens_total")
CACHED = router("kvroute_tenant_prompt_tokens_total", 'cause=~"hit|unexpected_hit"')
COMPUTED = router("kvroute_tenant_prompt_tokens_total", 'cause!~"hit|unexpected_hit"')
OUTPUT = router("kvroute_tenant_output_tokens_total")
SPENT = router("kvroute_tenant_gpu_seconds_total")
SAVED = router("kvroute_tenant_gpu_seconds_saved_total")
TENANT = "{{tenant}}"


def each(counter: str) -> tuple[Query, ...]:
    return (Query(per_second(counter, "tenant"), TENANT),)


def most(counter: str) -> tuple[Query, ...]:
    """Return the twenty tenants with most in the time range."""
    return (Query(f"topk (20, sum by (tenant) ({in_range(counter)}))", TENANT),)


COSTS = Row(
    "What it costs",
    (
        Panel(
            "GPU seconds spent",
            "By each tenant in the whole time range; the twenty with most. For a bill, take "
            "`kvroute tenants`: it loses nothing when a router or Prometheus starts again.",
            grafana.SECONDS,
            most(SPENT),
            kind="bargauge",
        ),
        Panel(
            "GPU seconds saved",
            "Prefill that the cache spared each tenant in the time range. Little for one that "
            "asks much: see its hit share below.",
            grafana.SECONDS,
            most(SAVED),
            kind="bargauge",
        ),
        Panel(
            "GPUs taken",
            "GPU seconds spent in a second: how many GPUs each tenant keeps busy. One that takes "
            "most of them makes the others wait: add replicas.",
            grafana.NUMBER,
            each(SPENT),
            stacking="normal",
        ),
    ),
)
TOKENS = Row(
    "Tokens",
    (
        Panel(
            "Prompt tokens from the cache",
            "Of each tenant, in a second. They cost next to nothing: let prompts begin alike.",
            grafana.TOKENS_PER_S,
            each(CACHED),
            stacking="normal",
        ),
        Panel(
            "Prompt tokens that were computed",
            "Of each tenant, in a second. When one rises and its requests do not, its prompts "
            "got longer, or begin otherwise: see its hit share.",
            grafana.TOKENS_PER_S,
            each(COMPUTED),
            stacking="normal",
        ),
        Panel(
            "Tokens of answers",
            "Of each tenant, in a second. These take most of a GPU's time: see what "
            "`max_tokens` a tenant asks for.",
            grafana.TOKENS_PER_S,
            each(OUTPUT),
            stacking="normal",
        ),
    ),
)
WELL = Row(
    "How they are served",
    (
        Panel(
            "Hit share",
            "Share of each tenant's prompt tokens that came from the cache. One far below the "
            "others: its prompts begin with what changes; `kvroute doctor` may say where.",
            grafana.FRACTION,
            (Query(share(per_second(CACHED, "tenant"), per_second(PROMPTS, "tenant")), TENANT),),
        ),
        Panel(
            "Requests",
            "Of each tenant, in a second; prompts of a call with several count one by one. A "
            "sudden rise of one may be a client that retries: see its log.",
            grafana.REQUESTS_PER_S,
            each(REQUESTS),
            stacking="normal",
        ),
        Panel(
            "Not answered whole",
            "cancelled: the client left, often since it waited for too long. refused: the engine "
            "cannot run it; see the error that the client got. failed: the replica was lost, and "
            "another one went on, where it could.",
            grafana.REQUESTS_PER_S,
            (Query(per_second(ENDED_BADLY, "tenant, outcome"), "{{tenant}} {{outcome}}"),),
        ),
    ),
)

TENANTS = Dashboard(
    "kvroute-tenants",
    "kvroute / Tenants",
    "What each tenant with an API key asks for, and what it costs.",
    (COSTS, TOKENS, WELL),
)
