"""Checks whether a larger cache or one more replica would increase the share of cache hits."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from prometheus_client.samples import Sample

from kvroute.doctor.checks import Check, Facts
from kvroute.doctor.load_checks import FEW_REQUESTS
from kvroute.wording import size

# Both numbers are shares of all prompt tokens.
MIN_GAIN = 0.03  # a larger cache is recommended if it would add at least this share of hits
MUCH_EVICTED = 0.05  # from this share of evicted tokens on, say if more memory would not help
DISK_REMEDY = (
    "blocks are read only if that is faster than computing them: use a faster disk, set a larger "
    "--disk-cache-gb, or do without --disk-cache"
)
ENGINE = "kvroute_engine_"  # prefix of the names of an engine's metrics


@dataclass(frozen=True, slots=True)
class CacheReading:
    """The counters of a replica's cache since the replica's start."""

    prompt_tokens: float
    cached_tokens: float
    # Size of a larger cache, relative to the real one -> estimate of the additional tokens that it
    # would have had. The engine computes it from a list of evicted blocks (replica/ghosts.py).
    ghost_hit_tokens: Mapping[float, float]
    disk_written_bytes: float = 0.0
    disk_read_bytes: float = 0.0


def reading(samples: Iterable[Sample]) -> CacheReading | None:
    """Return the counters from a process's metrics, or None if the process is not a replica."""
    values, ghosts, disk = dict[str, float](), dict[float, float](), dict[str, float]()
    for sample in samples:
        if sample.name == f"{ENGINE}disk_bytes_total":
            disk[sample.labels["direction"]] = sample.value
        if sample.name == f"{ENGINE}ghost_hit_tokens_total":
            ghosts[float(sample.labels["cache"])] = sample.value
        values[sample.name] = sample.value
    if not ghosts:
        return None
    prompt_tokens = values[f"{ENGINE}prompt_tokens_total"]
    cached_tokens = values[f"{ENGINE}cached_tokens_total"]
    written, read = disk.get("out", 0.0), disk.get("in", 0.0)
    return CacheReading(prompt_tokens, cached_tokens, ghosts, written, read)


def judge(
    model: str, hits: Facts, replicas: Sequence[CacheReading], *, is_busy: bool
) -> Iterator[Check]:
    """Check the size of a model's caches; yield nothing if there were only a few requests.

    Args:
        model: Name of the model.
        hits: Cache hits and misses of one router's recent requests, by cause.
        replicas: Counters of the model's replicas.
        is_busy: Whether requests wait for a replica.
    """
    total, prompt_tokens = sum(hits["tokens"].values()), sum(r.prompt_tokens for r in replicas)
    if not prompt_tokens or hits["requests"] < FEW_REQUESTS:
        return
    evicted = hits["tokens"]["evicted"] / total
    gains = _gains(replicas, prompt_tokens)
    finding = f"{evicted:.0%} of prompt tokens were lost to eviction; "
    finding += _hit_shares(model, replicas, gains)
    best = max(gains.values())
    if best < MIN_GAIN:
        neither = ": neither more memory nor one more replica helps"
        yield Check("cache", "ok", finding + (neither if evicted >= MUCH_EVICTED else ""))
    elif is_busy:
        remedy = f"one more replica, since requests wait: {_one_more(len(replicas), gains)}"
        yield Check("cache", "warning", finding, remedy)
    else:
        remedy = f"more memory: {_points(gains, 1.5)} with a cache of 1.5 times the size; "
        remedy += f"or one more replica: {_one_more(len(replicas), gains)}"
        yield Check("cache", "warning", finding, remedy)


def judge_disk(hits: Facts, replicas: Sequence[CacheReading]) -> Iterator[Check]:
    """Check that the disk cache is read, if blocks are missing that it should have.

    Args:
        hits: Cache hits and misses of one router's recent requests, by cause.
        replicas: Counters of the replicas of all models.
    """
    written = sum(replica.disk_written_bytes for replica in replicas)
    read = sum(replica.disk_read_bytes for replica in replicas)
    if not written or hits["requests"] < FEW_REQUESTS:
        return
    evicted = hits["tokens"]["evicted"] / sum(hits["tokens"].values())
    finding = f"{size(written)} were written to the disk cache, and {size(read)} read"
    if read or evicted < MUCH_EVICTED:
        yield Check("disk", "ok", finding)
        return
    finding += f", although {evicted:.0%} of prompt tokens were lost to eviction"
    yield Check("disk", "warning", finding, DISK_REMEDY)


def _gains(replicas: Sequence[CacheReading], prompt_tokens: float) -> dict[float, float]:
    """Return size -> additional share of prompt tokens that a cache of this size would have had."""
    return {
        size: sum(replica.ghost_hit_tokens[size] for replica in replicas) / prompt_tokens
        for size in sorted(replicas[0].ghost_hit_tokens)
    }


def _hit_shares(model: str, replicas: Sequence[CacheReading], gains: Mapping[float, float]) -> str:
    cached = sum(replica.cached_tokens for replica in replicas)
    share = cached / sum(replica.prompt_tokens for replica in replicas)
    larger = ", ".join(f"{share + gain:.0%} at {size:g}x" for size, gain in gains.items())
    return (
        f"hit share of {model} since its start: {share:.0%}; estimated for larger caches: {larger}"
    )


def _one_more(replicas: int, gains: Mapping[float, float]) -> str:
    """Return the gain of one more replica, if it held no copies of other replicas' blocks."""
    return f"{_points(gains, (replicas + 1) / replicas)} at most"


def _points(gains: Mapping[float, float], size: float) -> str:
    """Return the gain of a cache of this relative size; interpolate between sizes of `gains`."""
    gain = float(np.interp(size, [1.0, *gains], [0.0, *gains.values()]))
    return f"+{100 * gain:.1f} points of hit share"
