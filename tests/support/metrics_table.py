"""Generates the table in docs/metrics.md: `python -m tests.support.metrics_table` prints it."""

import json
import os
import random
from base64 import b64encode
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from kvroute.contract.records import Description
from kvroute.contract.unreadable import Unreadable
from kvroute.features import FEATURES
from kvroute.features.gate import OPEN, Gate
from kvroute.process.exposition import Readings
from kvroute.process.logs import DROPPED, FREE
from kvroute.replica.block_table import BlockTable
from kvroute.replica.engine_metrics import ReplicaMetrics
from kvroute.replica.ghosts import make_ghosts
from kvroute.replica.publisher import Publisher
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from kvroute.router.connections.links import Links
from kvroute.router.dispatch.blamed import PoisonList
from kvroute.router.index.feed import Feed
from kvroute.router.middleware.caller_check import gate_of
from kvroute.router.observability.metrics import RouterMetrics
from kvroute.router.observability.request_log import RequestLog
from kvroute.router.placement.fleet import Fleet
from kvroute.router.queueing.queue import Queue
from kvroute.router.serving.router_base import RouterBase
from kvroute.settings.help import SettingsError
from kvroute.settings.router import RouterSettings
from kvroute.store.connection import connect
from kvroute.store.index import Index
from tests.support.router_parts import FEATURES_ON, NoReplicas, builtin_prompts, fake_parts

NOWHERE = "redis://127.0.0.1"


def metrics_table() -> str:
    """Return a table in Markdown with a row for each metric."""
    rows = ["| metric | type | reported by each | |", "|---|---|---|---|"]
    registries = (("router", router()), ("replica", replica()), ("process", process()))
    for owner, registry in registries:
        for metric in registry.collect():
            name = f"`{metric.name}{'_total' if metric.type == 'counter' else ''}`"
            rows.append(
                f"| {name}{_labels(metric)} | {metric.type} | {owner} | {metric.documentation} |"
            )
    return "\n".join(rows)


def router() -> CollectorRegistry:
    """Return a registry with all metrics of a router, which is not running."""
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    fleet = Fleet(model="m", revision="", block_size=32, rng=random.Random(0))
    feed = Feed(index(), fleet)
    metrics.export(fleet, feed)
    metrics.export_unreadable(Unreadable())
    metrics.export_queue(Queue[None](lambda: 1.0))
    links = Links(NoReplicas)
    metrics.export_links(links)
    metrics.export_blamed(PoisonList())
    parts = fake_parts(builtin_prompts(), gate=_closed_gate(), features=FEATURES_ON)
    for side in parts.features:
        side.metrics(registry, metrics.readings)
    metrics.export_log(RequestLog(Path("unused"), model="m", block_size=32, ranks=lambda: 1))
    _export_services(parts.base, metrics.readings)
    return registry


def _closed_gate() -> Gate:
    """Return a gate that a feature closes, if one does, so that its metrics are in the table."""
    with TemporaryDirectory() as folder, suppress(SettingsError):
        file = Path(folder, "keys.json")
        file.write_text(json.dumps({"secret": b64encode(bytes(32)).decode()}))
        return gate_of(RouterSettings(served_model_name="m", redis_url=NOWHERE, api_keys=file))
    return OPEN


def _export_services(base: RouterBase, readings: Readings) -> None:
    """Export the metrics of the services of features, which do not run."""
    with TemporaryDirectory() as folder, patch.dict(os.environ, {"XDG_STATE_HOME": folder}):
        for feature in FEATURES:
            if service := feature.service(base):
                service.metrics(readings)
                service.close()


def process() -> CollectorRegistry:
    """Return a registry with the metrics of a process, except those of the client library."""
    registry = CollectorRegistry()
    registry.register(DROPPED)
    FREE.labels("unused")
    registry.register(FREE)
    return registry


def replica() -> CollectorRegistry:
    """Return a registry with all metrics of a replica, which is not running."""
    registry = CollectorRegistry()
    metrics = ReplicaMetrics(registry)
    engine = SimulatedEngine(SimulatedConfig())
    publisher = Publisher(
        index(),
        BlockTable(),
        replica_id="r",
        description=Description(engine.facts),
        load=engine.load,
        lease_s=3,
    )
    metrics.export([engine], [publisher], [make_ghosts(engine, BlockTable(engine.group_entries))])
    return registry


def index() -> Index:
    """Return an index that never connects to Redis."""
    return Index(connect(NOWHERE), "m")


def _labels(metric: Metric) -> str:
    """Return the metric's labels, except the label `le` of histograms."""
    names = {name for sample in metric.samples for name in sample.labels}
    names |= {*getattr(metric, "_labelnames", ())}  # of one that has no series yet
    return "".join(f" `{name}`" for name in sorted(names - {"le"}))


if __name__ == "__main__":
    print(metrics_table())
