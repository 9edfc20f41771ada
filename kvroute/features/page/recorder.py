"""Adds a sample to the history of a model every ten seconds."""

import asyncio
import time
from typing import Any

import msgspec

from kvroute.features.page.history import PERIOD_S, REPLICAS, History, SampledLoad, sample
from kvroute.features.page.traffic import Counts, Traffic, added
from kvroute.router.observability.queue_report import queue_report
from kvroute.router.placement.fleet import Fleet
from kvroute.router.queueing.queue import Queue


class Recorder:
    """Samples this router's traffic, and the load of all replicas and routers."""

    def __init__(self, traffic: Traffic, fleet: Fleet, queue: Queue[Any]) -> None:
        self.history = History()
        self._traffic = traffic
        self._fleet = fleet
        self._queue = queue
        self._encoded: dict[str | None, bytes] = {}  # by replica; None: of the fleet

    async def run(self) -> None:
        """Add samples until cancelled."""
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(PERIOD_S)
            now_s = time.monotonic()
            self.record(time.time(), elapsed_s=now_s - last_s)
            last_s = now_s

    def record(self, at_s: float, *, elapsed_s: float) -> None:
        """Add the samples of the period that ends now, at `at_s` in seconds since 1970."""
        counts = self._traffic.take()
        loads = {
            record.id: SampledLoad(running=record.load.running, waiting=record.load.waiting)
            for record in self._fleet.replicas.records
        }
        replicas = {
            replica_id: sample(
                counts.get(replica_id) or Counts(),
                loads.get(replica_id) or SampledLoad(),
                elapsed_s=elapsed_s,
            )
            for replica_id in loads.keys() | counts.keys()
        }
        fleet = sample(added(counts.values()), self._total(loads), elapsed_s=elapsed_s)
        self.history.add(at_s, fleet, replicas)
        self._encoded.clear()

    def as_json(self, replica_id: str | None) -> dict[str, Any]:
        """Return the samples of a replica, or of the fleet, for the live page."""
        history = self.history
        return {
            "period_s": PERIOD_S,
            "replica": replica_id,
            "replicas": history.replicas(),
            "samples": history.of_replica(replica_id) if replica_id else history.of_fleet(),
        }

    def encoded(self, replica_id: str | None) -> bytes:
        """Return the result of `as_json` as JSON text, which is encoded once for all pages."""
        encoded = self._encoded.get(replica_id)
        if encoded is None:
            encoded = msgspec.json.encode(self.as_json(replica_id))
            if len(self._encoded) <= REPLICAS:
                self._encoded[replica_id] = encoded
        return encoded

    def _total(self, loads: dict[str, SampledLoad]) -> SampledLoad:
        """Return the load of the fleet, with the requests that wait in all routers."""
        queued = queue_report(self._queue, time.monotonic())["all_routers"]["requests"]
        return SampledLoad(
            running=sum(load.running for load in loads.values()),
            waiting=sum(load.waiting for load in loads.values()),
            queued=queued,
        )
