"""Prometheus metrics of the tenants' usage.

The first MAX_NAMES tenants (accounting/accounts.py) have series of their own. All other tenants
share one series.
"""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvroute.features.keys.accounting.accounts import MAX_NAMES, OUTCOMES, PHASES, US, Accounts
from kvroute.features.keys.limits import OTHER
from kvroute.router.placement.ledger import CAUSES


class TenantMetrics(Collector):
    """Reads the accounts when Prometheus scrapes the metrics, in the thread of that request."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def collect(self) -> Iterable[Metric]:
        totals = [(name, dict(account)) for name, account in list(self._accounts.totals.items())]
        requests = _counter(
            "requests",
            "Requests of each tenant with an API key, by outcome: ok, cancelled, refused, failed "
            "(the replica was lost; most are sent again and then counted again).",
            "outcome",
        )
        prompt_tokens = _counter(
            "prompt_tokens",
            "Tokens of the prompts of each tenant's requests, by the ledger's cause.",
            "cause",
        )
        output_tokens = _counter("output_tokens", "Output tokens of each tenant's requests.")
        spent = _counter(
            "gpu_seconds",
            "GPU seconds that each tenant's requests took, by phase: prefill (predicted by the "
            "speed model), decode (each request's share of its replica's time). A CPU replica "
            "counts as one GPU.",
            "phase",
        )
        saved = _counter(
            "gpu_seconds_saved",
            "GPU seconds of prefill that cached tokens saved for each tenant's requests.",
        )
        for tenant, account in totals:
            for outcome in OUTCOMES:
                requests.add_metric([tenant, outcome], account.get(outcome, 0))
            for cause in CAUSES:
                prompt_tokens.add_metric([tenant, cause], account.get(cause, 0))
            output_tokens.add_metric([tenant], account.get("output_tokens", 0))
            for phase in PHASES:
                spent.add_metric([tenant, phase], account.get(f"{phase}_us", 0) / US)
            saved.add_metric([tenant], account.get("saved_us", 0) / US)
        refused = _counter(
            "refused_requests",
            "Requests rejected for a limit of their tenant: requests, prompt_tokens, "
            f"uncached_tokens. All tenants after the first {MAX_NAMES} count as `{OTHER}`.",
            "limit",
        )
        for tenant, refusals in list(self._accounts.refusals.items()):
            for limit, count in list(refusals.items()):
                refused.add_metric([tenant, limit], count)
        return refused, requests, prompt_tokens, output_tokens, spent, saved


def _counter(name: str, documentation: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvroute_tenant_{name}", documentation, labels=["tenant", *labels])
