"""Prometheus metrics whose values are read at scrape time, and a fast histogram."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Read = Callable[[], float]  # returns the value of a metric
ReadEach = Callable[[], Mapping[str, float]]  # returns label value -> metric value


class Readings(Collector):
    """Metrics whose values are read at scrape time, in the scrape's thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # Each tuple is (name, documentation, read), or (name, documentation, label, read).
        self._gauges: list[tuple[str, str, Read]] = []
        self._counters: list[tuple[str, str, Read]] = []
        self._labelled_gauges: list[tuple[str, str, str, ReadEach]] = []
        self._labelled_counters: list[tuple[str, str, str, ReadEach]] = []
        registry.register(self)

    def gauge(self, name: str, documentation: str, read: Read) -> None:
        """Add a gauge; `read` returns its value."""
        self._gauges.append((name, documentation, read))

    def counter(self, name: str, documentation: str, read: Read) -> None:
        """Add a counter; `read` returns its value, which never decreases."""
        self._counters.append((name, documentation, read))

    def labelled_gauge(self, label: str, name: str, documentation: str, read: ReadEach) -> None:
        """Add a gauge with a label; `read` returns label value -> value of the gauge."""
        self._labelled_gauges.append((name, documentation, label, read))

    def labelled_counter(self, label: str, name: str, documentation: str, read: ReadEach) -> None:
        """Add a counter with a label; `read` returns label value -> value of the counter."""
        self._labelled_counters.append((name, documentation, label, read))

    def collect(self) -> Iterable[Metric]:
        for name, documentation, read in self._gauges:
            yield GaugeMetricFamily(name, documentation, value=read())
        for name, documentation, read in self._counters:
            yield CounterMetricFamily(name, documentation, value=read())
        for name, documentation, label, read_each in self._labelled_gauges:
            gauge = GaugeMetricFamily(name, documentation, labels=[label])
            yield _add_values(gauge, read_each)
        for name, documentation, label, read_each in self._labelled_counters:
            counter = CounterMetricFamily(name, documentation, labels=[label])
            yield _add_values(counter, read_each)


def _add_values(
    family: GaugeMetricFamily | CounterMetricFamily, read_each: ReadEach
) -> GaugeMetricFamily | CounterMetricFamily:
    for value_of_label, value in read_each().items():
        family.add_metric([value_of_label], value)
    return family


class FastHistogram(Collector):
    """A histogram for thousands of observations per second. Only one thread may call `observe`."""

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._documentation, self._bounds = name, documentation, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = [*zip(names, accumulate(self._counts), strict=True)]
        yield HistogramMetricFamily(self._name, self._documentation, buckets, self._sum)


class Process(Collector):
    """All metrics of prometheus_client's default registry, such as this process's memory."""

    def collect(self) -> Iterable[Metric]:
        return REGISTRY.collect()
