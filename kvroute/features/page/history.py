"""The last hour of a model in one router, as samples of ten seconds, for the live page's charts."""

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from kvroute.features.page.traffic import Counts
from kvroute.router.observability.recent_requests import quantile

PERIOD_S = 10.0  # time between two samples
SAMPLES = 360  # samples in memory, which is one hour
REPLICAS = 200  # replicas with samples of their own; each takes up to 100 kB


class SampledLoad(Struct, frozen=True):
    """The numbers of running and of waiting requests at the time of a sample."""

    running: int = 0  # requests that run in engines
    waiting: int = 0  # requests that wait in engines
    queued: int | None = None  # requests that wait in all routers; None in a replica's samples


class Sample(SampledLoad, frozen=True, kw_only=True):
    """The requests of one period, of one replica or of the fleet."""

    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that came from a cache
    ttft_p50_s: float | None  # None: no request got its first token in this period
    ttft_p90_s: float | None
    tpot_p50_s: float | None  # None: no answer with several tokens ended in this period
    tpot_p90_s: float | None


def sample(counts: Counts, load: SampledLoad, *, elapsed_s: float) -> Sample:
    """Return the sample of a period that lasted `elapsed_s`."""
    return Sample(
        requests_per_s=round(counts.requests / elapsed_s, 3),
        output_tokens_per_s=round(counts.output_tokens / elapsed_s, 1),
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        ttft_p50_s=quantile(counts.ttfts.kept_s, 50),
        ttft_p90_s=quantile(counts.ttfts.kept_s, 90),
        tpot_p50_s=quantile(counts.gaps.kept_s, 50),
        tpot_p90_s=quantile(counts.gaps.kept_s, 90),
        **asdict(load),
    )


class History:
    """The samples of the fleet and of its replicas; a new sample replaces the oldest."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=SAMPLES)
        self._fleet: deque[Sample] = deque(maxlen=SAMPLES)
        self._replicas: deque[dict[str, Sample]] = deque(maxlen=SAMPLES)

    def add(self, at_s: float, fleet: Sample, replicas: Mapping[str, Sample]) -> None:
        """Add the samples of a period that ended at `at_s`, in seconds since 1970."""
        self._times_s.append(at_s)
        self._fleet.append(fleet)
        self._replicas.append(dict(islice(sorted(replicas.items()), REPLICAS)))

    def replicas(self) -> list[str]:
        """Return the ids of all replicas that have a sample, also of those that are gone."""
        return sorted({replica_id for samples in self._replicas for replica_id in samples})

    def of_fleet(self) -> dict[str, list[Any]]:
        """Return a list of values by name, oldest first, and the list of their times."""
        return self._columns(self._fleet)

    def of_replica(self, replica_id: str) -> dict[str, list[Any]]:
        """Return the replica's values as `of_fleet` does; None where it was not in the fleet."""
        return self._columns(samples.get(replica_id) for samples in self._replicas)

    def _columns(self, samples: Iterable[Sample | None]) -> dict[str, list[Any]]:
        rows = list(samples)
        columns: dict[str, list[Any]] = {"at_s": [round(at_s, 1) for at_s in self._times_s]}
        for name in Sample.__struct_fields__:
            columns[name] = [row and getattr(row, name) for row in rows]
        return columns
