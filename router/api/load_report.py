"""The load of a model's replicas in a response header, for load balancers that read ORCA's reports.

vLLM's server has the same header, with the load of its one engine.
"""

import json
from collections.abc import Mapping, Sequence

from kvroute.contract.records import ReplicaRecord
from kvroute.router.api.calls import CHATS, COMPLETIONS

FORM = "endpoint-load-metrics-format"  # header of a request that wants a report: TEXT or JSON
REPORT = "endpoint-load-metrics"
REPORTING = (CHATS, COMPLETIONS)  # routes


def load_of(records: Sequence[ReplicaRecord], *, queued: int) -> dict[str, float]:
    """Return the load under vLLM's names.

    records: of all replicas. queued: requests that wait in this router.
    """
    blocks = sum(record.facts.capacity_blocks for record in records)
    used = sum(record.load.used_blocks for record in records)
    waiting = sum(record.load.waiting for record in records)
    return {
        "kv_cache_usage_perc": used / max(1, blocks),
        "num_requests_waiting": float(waiting + queued),
    }


def report_headers(form: str, load: Mapping[str, float]) -> dict[str, str]:
    """Return the header with the report; none for a form that vLLM does not know."""
    if form.lower() == "text":
        values = (f"named_metrics.{name}={value}" for name, value in load.items())
        return {REPORT: f"TEXT {', '.join(values)}"}
    if form.lower() == "json":
        return {REPORT: f"JSON {json.dumps({'named_metrics': load})}"}
    return {}
