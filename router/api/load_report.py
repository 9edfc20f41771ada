"""A response header with the load of a model's replicas, for load balancers.

Its format is ORCA (Open Request Cost Aggregation), which Envoy and gRPC read. vLLM's server sends
the same header with the load of its only engine.
"""

import json
from collections.abc import Mapping, Sequence

from kvroute.contract.records import ReplicaRecord
from kvroute.router.api.calls import CHAT_COMPLETIONS, COMPLETIONS

FORMAT_HEADER = "endpoint-load-metrics-format"  # request header with the format: TEXT or JSON
REPORT_HEADER = "endpoint-load-metrics"  # response header with the report
REPORTING = (CHAT_COMPLETIONS, COMPLETIONS)  # routes whose responses can have the report


def cluster_load(records: Sequence[ReplicaRecord], *, queued: int) -> dict[str, float]:
    """Return the load of all replicas of a model, with vLLM's names of the metrics.

    Args:
        records: the replicas' records in the index.
        queued: number of requests that wait in this router.
    """
    blocks = sum(record.facts.capacity_blocks for record in records)
    used = sum(record.load.used_blocks for record in records)
    waiting = sum(record.load.waiting for record in records)
    return {
        "kv_cache_usage_perc": used / max(1, blocks),
        "num_requests_waiting": float(waiting + queued),
    }


def report_headers(report_format: str, load: Mapping[str, float]) -> dict[str, str]:
    """Return the header with the report, or no header if vLLM does not know the format."""
    if report_format.lower() == "text":
        values = (f"named_metrics.{name}={value}" for name, value in load.items())
        return {REPORT_HEADER: f"TEXT {', '.join(values)}"}
    if report_format.lower() == "json":
        return {REPORT_HEADER: f"JSON {json.dumps({'named_metrics': load})}"}
    return {}
