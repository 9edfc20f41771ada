"""Checks whether hits that were lost to eviction call for more memory, or for one more replica."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from prometheus_client.samples import Sample

from kvroute.doctor.checks import Check, Facts
from kvroute.doctor.load_checks import FEW_REQUESTS

WORTH = 0.03  # of all prompt tokens: the least that a larger cache has to bring
MUCH_EVICTED = 0.05  # of all prompt tokens
ENGINE = "kvroute_engine_"


@dataclass(frozen=True, slots=True)
class CacheReading:
    """What a replica has counted since its start."""

    prompt_tokens: float
    cached_tokens: float
    ghost_hit_tokens: Mapping[float, float]  # by the size of a cache, over the one that it has


def reading(samples: Iterable[Sample]) -> CacheReading | None:
    """Of a process's metrics; None: it is no replica."""
    found, ghosts = dict[str, float](), dict[float, float]()
    for sample in samples:
        if sample.name == f"{ENGINE}ghost_hit_tokens_total":
            ghosts[float(sample.labels["cache"])] = sample.value
        found[sample.name] = sample.value
    if not ghosts:
        return None
    prompt_tokens = found[f"{ENGINE}prompt_tokens_total"]
    return CacheReading(prompt_tokens, found[f"{ENGINE}cached_tokens_total"], ghosts)


def judge(
    model: str, hits: Facts, replicas: Sequence[CacheReading], *, is_busy: bool
) -> Iterator[Check]:
    """hits: the ledger of one router's recent requests. replicas: of the model. is_busy: requests
    wait for replicas. Of few requests nothing is said."""
    total, prompt_tokens = sum(hits["tokens"].values()), sum(r.prompt_tokens for r in replicas)
    if not prompt_tokens or hits["requests"] < FEW_REQUESTS:
        return
    evicted = hits["tokens"]["evicted"] / total
    gains = _gains(replicas, prompt_tokens)
    finding = (
        f"{evicted:.0%} of prompt tokens were lost to eviction; {_told(model, replicas, gains)}"
    )
    best = max(gains.values())
    if best < WORTH:
        neither = ": neither more memory nor one more replica helps"
        yield Check("cache", "ok", finding + (neither if evicted >= MUCH_EVICTED else ""))
    elif is_busy:
        remedy = f"one more replica, since requests wait: {_one_more(len(replicas), gains)}"
        yield Check("cache", "warning", finding, remedy)
    else:
        remedy = f"more memory: {_points(gains, 1.5)} with a cache of 1.5 times the size; "
        remedy += f"or one more replica: {_one_more(len(replicas), gains)}"
        yield Check("cache", "warning", finding, remedy)


def _gains(replicas: Sequence[CacheReading], prompt_tokens: float) -> dict[float, float]:
    """The additional share of prompt tokens that caches of each size would have found."""
    return {
        size: sum(replica.ghost_hit_tokens[size] for replica in replicas) / prompt_tokens
        for size in sorted(replicas[0].ghost_hit_tokens)
    }


def _told(model: str, replicas: Sequence[CacheReading], gains: Mapping[float, float]) -> str:
    cached = sum(replica.cached_tokens for replica in replicas)
    share = cached / sum(replica.prompt_tokens for replica in replicas)
    larger = ", ".join(f"{share + gain:.0%} at {size:g}x" for size, gain in gains.items())
    return f"since their start, caches of {model} found {share:.0%}; larger ones: {larger}"


def _one_more(replicas: int, gains: Mapping[float, float]) -> str:
    """It adds its cache to the others'; copies of what they have count for nothing."""
    return f"{_points(gains, (replicas + 1) / replicas)} at most"


def _points(gains: Mapping[float, float], size: float) -> str:
    """Of hit share."""
    gain = float(np.interp(size, [1.0, *gains], [0.0, *gains.values()]))
    return f"+{100 * gain:.1f} points of hit share"
