"""A replica's metrics and block table account for blocks and copies in host memory."""

from prometheus_client import CollectorRegistry

from kvroute.blocks.cache_groups import HOST_GROUPS
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import HOST
from kvroute.replica.block_table import BlockTable, Changes
from kvroute.replica.engine.kv_events import BlockRemoved, BlockStored, Transfers
from kvroute.replica.engine_metrics import ReplicaMetrics

ONE, TWO = Fingerprint(1), Fingerprint(2)
STORED = BlockStored([10], [ONE]), BlockStored([10, 20], [ONE, TWO], group=1)


def test_a_block_that_leaves_the_engine_stays_known_in_host_memory() -> None:
    table, changes = BlockTable((0, HOST_GROUPS)), Changes()
    table.apply([*STORED, BlockRemoved([10])], changes)
    assert set(table.held()) == {HOST.fingerprint(ONE), HOST.fingerprint(TWO)}
    assert len(table.in_host) == 2
    table.apply([BlockRemoved([10], group=1)], changes)
    assert table.held() == [HOST.fingerprint(TWO)]
    assert not BlockTable((0,)).in_host


def test_stores_in_host_memory_do_not_count_for_the_engines_cache() -> None:
    registry = CollectorRegistry()
    metrics = ReplicaMetrics(registry)
    metrics.record_events([*STORED, BlockRemoved([20], group=1)], groups=1)
    assert registry.get_sample_value("kvroute_engine_stored_blocks_total") == 1
    assert registry.get_sample_value("kvroute_engine_evicted_blocks_total") == 0


def test_transfers_are_counted_by_direction() -> None:
    registry = CollectorRegistry()
    ReplicaMetrics(registry).record_events([Transfers(64, 100, 0.5, 10, 0.25)] * 2)
    assert registry.get_sample_value("kvroute_engine_reloaded_tokens_total") == 128
    for name, way, value in (
        ("bytes", "in", 200),
        ("bytes", "out", 20),
        ("seconds", "in", 1.0),
        ("seconds", "out", 0.5),
    ):
        told = registry.get_sample_value(f"kvroute_engine_host_{name}_total", {"direction": way})
        assert told == value
