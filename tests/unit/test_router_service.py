"""The core calls the services of features, and knows their routes before a request is routed."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from kvroute.features.feature import Paths
from kvroute.features.figure import Figure
from kvroute.features.router_service import RouterService, RouterServices
from kvroute.process.exposition import Readings

FIGURE = Figure("Time", "12:00", "noon", "The time.")


class Clock(RouterService):
    """A service that keeps what the core calls, in order."""

    name = "clock"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def attach(self, application: ASGIApp) -> None:
        self.calls.append("attach")

    def metrics(self, readings: Readings) -> None:
        readings.gauge("kvroute_clock", "A clock.", lambda: 1.0)
        self.calls.append("metrics")

    def start(self) -> None:
        self.calls.append("start")

    def check(self) -> None:
        raise RuntimeError("the clock has stopped")

    async def stop(self) -> None:
        self.calls.append("stop")

    def close(self) -> None:
        self.calls.append("close")

    async def facts(self) -> Mapping[str, Any]:
        return {"hour": 12}

    def figures(self) -> Sequence[Figure]:
        return [FIGURE]


class Silent(RouterService):
    name = "silent"


async def test_a_service_is_started_checked_and_stopped_with_its_router() -> None:
    clock, registry = Clock(), CollectorRegistry()
    services = RouterServices([Silent(), clock])
    services.attach(FastAPI())
    services.start(Readings(registry))
    with pytest.raises(RuntimeError, match="stopped"):
        services.check()
    await services.stop()
    services.close()
    assert clock.calls == ["attach", "metrics", "start", "stop", "close"]
    assert registry.get_sample_value("kvroute_clock") == 1


def test_without_metrics_a_service_starts_all_the_same() -> None:
    clock = Clock()
    RouterServices([clock]).start(None)
    assert clock.calls == ["start"]


async def test_operators_see_only_services_that_have_something_to_show() -> None:
    services = RouterServices([Silent(), Clock()])
    assert await services.facts() == {"clock": {"hour": 12}}
    assert services.figures() == [FIGURE]
    assert isinstance(services.get("silent"), Silent)
    assert services.get("other") is None


def test_the_paths_of_several_features_are_one_list_for_each_role() -> None:
    one, other = Paths(use=["/a"], forms=["/a"]), Paths(use=["/b", "/c"])
    assert Paths.joined([one, Paths(), other]) == Paths(use=("/a", "/b", "/c"), forms=("/a",))
    assert Paths.joined([]) == Paths()
