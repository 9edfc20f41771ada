"""The README's table of metrics, from the metrics: `python -m tests.metrics_table`."""

import random
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from replica.events import BlockTable
from replica.kvindex.index import Index, connect
from replica.metrics import ReplicaMetrics
from replica.publisher import Publisher
from replica.simulated import SimulatedConfig, SimulatedEngine
from router.feed import Feed
from router.fleet import Fleet
from router.metrics import RouterMetrics
from router.request_log import RequestLog


def metrics_table() -> str:
    """Markdown, one row for each metric."""
    rows = ["| metric | type | of each | |", "|---|---|---|---|"]
    for process, registry in (("router", router()), ("replica", replica())):
        for metric in registry.collect():
            name = f"`{metric.name}{'_total' if metric.type == 'counter' else ''}`"
            rows.append(
                f"| {name}{_labels(metric)} | {metric.type} | {process} | {metric.documentation} |"
            )
    return "\n".join(rows)


def router() -> CollectorRegistry:
    """All that a router tells; of one that knows nothing and runs nowhere."""
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    fleet = Fleet(model="m", revision="", block_size=32, rng=random.Random(0))
    metrics.watch(fleet, Feed(index(), fleet))
    metrics.watch_log(RequestLog(Path("unused"), model="m", block_size=32))
    return registry


def replica() -> CollectorRegistry:
    """The same of a replica."""
    registry = CollectorRegistry()
    metrics = ReplicaMetrics(registry)
    engine = SimulatedEngine(SimulatedConfig())
    publisher = Publisher(
        index(),
        BlockTable(model="m", revision="", block_size=32),
        replica_id="r",
        facts={},
        load=dict,
        lease_s=3,
    )
    metrics.watch(engine, publisher)
    return registry


def index() -> Index:
    """One whose Redis is never asked."""
    return Index(connect("redis://127.0.0.1"), "m")


def _labels(metric: Metric) -> str:
    """Besides those that Prometheus adds, and a histogram's own."""
    names = {name for sample in metric.samples for name in sample.labels} - {"le"}
    return "".join(f" `{name}`" for name in sorted(names))


if __name__ == "__main__":
    print(metrics_table())
