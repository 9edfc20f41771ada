"""Checks recent requests: causes of cache misses, changed chats, busy replicas, and waits."""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from kvroute.doctor.checks import Check, Facts
from kvroute.features import FEATURES
from kvroute.features import REFUSALS as FEATURE_REFUSALS
from kvroute.router.placement.ledger import CACHED
from kvroute.wording import plural

# A warning if a replica has more than this many seconds of prefill queued, or if requests have
# waited longer on average.
LONG_S = 5.0
FEW_REQUESTS = 20  # with fewer recent requests, cache hits are not judged
LONG_WAIT_S = 1.0  # a warning if a queued request has waited this many seconds or more
REFUSALS = {  # reason of a refusal -> its description, which follows the number of requests
    "forecast": "would have waited too long",
    "deadline": "had waited too long",
    "full": "found the queue full",
    "no_replica": "found no replica",
    **{reason: text.finding for reason, text in FEATURE_REFUSALS.items()},
}
BIGGER = "add replicas, or set a larger --max-replicas"


class Limit(NamedTuple):
    """When a cause of misses is a warning, and what the warning says."""

    share: float  # above this share of all prompt tokens, the cause is a warning
    meaning: str
    remedy: str


# The ledger (router/placement/ledger.py) counts each prompt token under one cause, which says why
# the token was cached or not.
COMPUTED = {  # cause of misses in the ledger -> which tokens had to be computed
    "stale": "were expected in a cache that did not have them",
    "spilled": "were cached on a busier replica",
    "unpinned": "had to be kept in caches, and were in none",
    "partial": "were cached for some layers only",
    "evicted": "were evicted",
    "broken": "came after a change in a chat",
    "new": "were never cached",
    "isolated": "were new under their cache_salt",
    "tail": "are in no full block",
}
LIMITS = {  # cause of misses in the ledger -> when it is a warning
    "stale": Limit(
        0.1,
        "the router expected tokens in caches that did not have them",
        "see kvroute_publisher_lag_seconds",
    ),
    "spilled": Limit(
        0.2,
        "the replicas that had cached the prompts were too busy to get them",
        "add replicas",
    ),
    "unpinned": Limit(
        0.1,
        "they had to be kept in caches, and were in none",
        "a larger --pin-share pins more",
    ),
    "evicted": Limit(
        0.2,
        "the blocks were evicted, cleared, or lost with their replica",
        "add memory for caches, or add replicas; was a cache cleared or a replica replaced?",
    ),
}

SLOW = (
    "routers already send it fewer requests; check its GPU's temperature and clocks (nvidia-smi -q "
    "-d PERFORMANCE) and other programs on its machine, or replace it"
)


def hits(ledger: Facts) -> Iterator[Check]:
    """Check the causes of cache misses.

    Args:
        ledger: Hits and misses of one router's requests in the last window_s seconds, by cause.
    """
    tokens, requests = ledger["tokens"], ledger["requests"]
    total = sum(tokens.values())
    if requests < FEW_REQUESTS:
        yield Check("hits", "ok", f"{requests} requests in {_minutes(ledger)}: too few to judge")
        return
    causes = [cause for cause in LIMITS if tokens[cause] > LIMITS[cause].share * total]
    for cause in causes:
        share, limit = tokens[cause] / total, LIMITS[cause]
        finding = f"{cause}: {share:.0%} of the prompts' tokens; {limit.meaning}"
        further = (feature.misses.get(cause) for feature in FEATURES)
        remedy = "; ".join([limit.remedy, *filter(None, further)])
        yield Check("hits", "warning", finding, remedy)
    if not causes:
        yield Check("hits", "ok", f"in {_minutes(ledger)}, {_shares(tokens, total)}")


def load(backlogs_s: Mapping[str, float]) -> Iterator[Check]:
    """Check how much prefill is queued at the replicas.

    Args:
        backlogs_s: Replica -> seconds of prefill that are queued or running.
    """
    if not backlogs_s:
        return
    median_s = statistics.median(backlogs_s.values())
    busy = {replica_id: s for replica_id, s in backlogs_s.items() if s > LONG_S}
    if median_s > LONG_S:
        finding = f"half of the replicas have at least {median_s:.0f} s of prefill queued"
        yield Check("load", "warning", finding, BIGGER)
        return
    for replica_id, backlog_s in busy.items():
        finding = f"replica {replica_id} has {backlog_s:.0f} s of prefill queued"
        finding += f", and half of the replicas at most {median_s:.1f} s"
        remedy = "kvroute explain shows why prompts go there; is the replica slower than others?"
        yield Check("load", "warning", finding, remedy)
    if not busy:
        longest_s = max(backlogs_s.values())
        yield Check("load", "ok", f"{longest_s:.1f} s of prefill in the longest queue")


def speeds(slow: Mapping[str, float]) -> Iterator[Check]:
    """Check for replicas that are far slower than the others.

    Args:
        slow: Slow replica -> factor by which it is slower than the others.
    """
    for replica_id, factor in slow.items():
        finding = (
            f"replica {replica_id} computes prompts {factor:.1f} times as slowly as the others"
        )
        yield Check("speed", "warning", finding, SLOW)
    if not slow:
        yield Check("speed", "ok", "no replica is far slower than the others")


def is_busy(backlogs_s: Mapping[str, float], queues: Iterable[Facts]) -> bool:
    """Return whether requests wait because the whole fleet is busy.

    Args:
        backlogs_s: Replica -> seconds of prefill that are queued or running.
        queues: For each model, one router's queue.
    """
    if backlogs_s and statistics.median(backlogs_s.values()) > LONG_S:
        return True
    return any(
        [*_waiting(queue), *_refused(queue)] or queue["recent"]["mean_s"] >= LONG_S
        for queue in queues
    )


def queues(queues: Iterable[Facts]) -> Iterator[Check]:
    """Check how long requests wait in a router's queue.

    Args:
        queues: For each model, one router's queue: waiting requests and recent waits.
    """
    for queue in queues:
        problems = [*_waiting(queue), *_refused(queue)]
        yield from problems or [_have_waited(queue)]


def _waiting(queue: Facts) -> Iterator[Check]:
    """Check the queue of normal requests only, since background requests are meant to wait."""
    normal, all_requests = queue["lines"]["default"], queue["all_routers"]["requests"]
    if normal["oldest_s"] < LONG_WAIT_S:
        return
    finding = (
        f"{plural(normal['requests'], 'request')} for {queue['model']} in the queue, since every "
    )
    finding += f"replica is busy: {normal['prefill_s']:.0f} s of prefill, the oldest for "
    finding += f"{normal['oldest_s']:.0f} s"
    if all_requests > queue["requests"]:
        finding += f"; {all_requests:,} requests in the queues of all routers"
    yield Check("queue", "warning", finding, BIGGER)


def _refused(queue: Facts) -> Iterator[Check]:
    refused = queue["recent"]["refused"]
    if not refused:
        return
    reasons = ", ".join(f"{n:,} {REFUSALS.get(reason, reason)}" for reason, n in refused.items())
    finding = f"{plural(sum(refused.values()), 'request')} for {queue['model']} refused in "
    finding += f"{_minutes(queue['recent'])}: {reasons}"
    options = {
        text.option if (text := FEATURE_REFUSALS.get(reason)) else "--max-wait-s"
        for reason in refused
    }
    option = options.pop() if len(options) == 1 else "--max-wait-s"
    yield Check("queue", "warning", finding, f"{BIGGER}; or set a larger {option}")


def _have_waited(queue: Facts) -> Check:
    if queue["recent"]["mean_s"] < LONG_S:
        return Check("queue", "ok", _waited(queue))
    return Check("queue", "warning", _waited(queue), BIGGER)


def _waited(queue: Facts) -> str:
    recent, minutes = queue["recent"], _minutes(queue["recent"])
    if not recent["waited"]:
        return f"no request for {queue['model']} had to wait for a replica in {minutes}"
    finding = f"{plural(recent['waited'], 'request')} for {queue['model']} had to wait for a "
    finding += f"replica in {minutes}: {recent['mean_s']:.1f} s on average, "
    return finding + f"{recent['longest_s']:.1f} s at most"


def _shares(tokens: Mapping[str, int], total: int) -> str:
    """Return the share of cached tokens, and why the others were computed, largest share first."""
    cached = sum(tokens[cause] for cause in CACHED) / total
    missed = sorted(
        (cause for cause in COMPUTED if tokens[cause]), key=lambda cause: -tokens[cause]
    )
    shares = [f"{tokens[cause] / total:.0%} {COMPUTED[cause]}" for cause in missed]
    return "; ".join([f"{cached:.0%} of {total:,} prompt tokens came from a cache", *shares])


def _minutes(recent: Facts) -> str:
    return f"{recent['window_s'] / 60:.0f} minutes"
