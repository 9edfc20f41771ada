"""A response header with the load of a model's replicas, for load balancers that read ORCA reports.

vLLM's server sends the same header with the load of its one engine.
"""

import json
from collections.abc import Mapping, Sequence

from kvroute.contract.records import ReplicaRecord
from kvroute.router.api.calls import CHATS, COMPLETIONS

FORMAT_HEADER = "endpoint-load-metrics-format"  # a request header that asks for TEXT or JSON
REPORT_HEADER = "endpoint-load-metrics"
REPORTING = (CHATS, COMPLETIONS)  # routes whose responses can have the report


def load_of(records: Sequence[ReplicaRecord], *, queued: int) -> dict[str, float]:
    """Return the load under vLLM's names.

    Args:
        records: the records of all replicas of the model.
        queued: requests that wait in this router.
    """
    blocks = sum(record.facts.capacity_blocks for record in records)
    used = sum(record.load.used_blocks for record in records)
    waiting = sum(record.load.waiting for record in records)
    return {
        "kv_cache_usage_perc": used / max(1, blocks),
        "num_requests_waiting": float(waiting + queued),
    }


def report_headers(form: str, load: Mapping[str, float]) -> dict[str, str]:
    """Return the header with the report; empty if vLLM does not know the format."""
    if form.lower() == "text":
        values = (f"named_metrics.{name}={value}" for name, value in load.items())
        return {REPORT_HEADER: f"TEXT {', '.join(values)}"}
    if form.lower() == "json":
        return {REPORT_HEADER: f"JSON {json.dumps({'named_metrics': load})}"}
    return {}
