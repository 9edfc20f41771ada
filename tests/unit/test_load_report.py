"""The response header with the load of a model's replicas."""

import pytest

from kvroute.contract.records import EngineFacts, Load, ReplicaRecord
from kvroute.router.api.load_report import cluster_load, report_headers

FACTS = EngineFacts(
    block_size=16, capacity_blocks=100, max_model_len=1000, prefill_tokens_per_s=1000.0
)


def test_the_load_sums_all_replicas_and_the_routers_queue() -> None:
    loads = Load(used_blocks=30, waiting=1), Load(used_blocks=20, waiting=2)
    records = [ReplicaRecord(str(load.waiting), "1", 0, FACTS, load) for load in loads]
    assert cluster_load(records, queued=4) == {
        "kv_cache_usage_perc": 0.25,
        "num_requests_waiting": 7.0,
    }
    assert cluster_load([], queued=0) == {"kv_cache_usage_perc": 0.0, "num_requests_waiting": 0.0}


@pytest.mark.parametrize(
    ("form", "report"),
    [
        ("TEXT", "TEXT named_metrics.usage=0.25, named_metrics.waiting=7.0"),
        ("text", "TEXT named_metrics.usage=0.25, named_metrics.waiting=7.0"),
        ("JSON", 'JSON {"named_metrics": {"usage": 0.25, "waiting": 7.0}}'),
    ],
)
def test_the_report_is_written_as_vllm_writes_it(form: str, report: str) -> None:
    load = {"usage": 0.25, "waiting": 7.0}
    assert report_headers(form, load) == {"endpoint-load-metrics": report}


def test_there_is_no_report_in_an_unknown_format() -> None:
    assert report_headers("BIN", {"usage": 0.25}) == {}
