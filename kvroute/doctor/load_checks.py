"""Checks of recent requests: causes of missed hits, changed chats, busy replicas, and waits."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvroute.doctor.checks import Check, Facts

LONG_S = 5.0  # of prefill in a queue
FEW_REQUESTS = 20  # fewer are not judged
LONG_WAIT_S = 1.0  # for a replica with room
REFUSALS = {
    "forecast": "would have waited too long",
    "deadline": "had waited too long",
    "full": "found too many waiting",
    "no_replica": "found no replica",
    "no_seat": "had to wait too long for a seat of their session",
}
BIGGER = "more replicas, or a larger --max-replicas"


class Limit(NamedTuple):
    share: float  # of all prompt tokens, above which it is a warning
    meaning: str
    remedy: str


LIMITS = {
    "stale": Limit(
        0.1,
        "the router expected tokens in caches that did not have them",
        "ask again with --audit; look at kvroute_publisher_lag_seconds",
    ),
    "spilled": Limit(
        0.2,
        "prompts did not go where they are cached, since it is busy there",
        "more replicas; or declare what many prompts begin with: kvroute prefixes add",
    ),
    "unpinned": Limit(
        0.1,
        "named prefixes were cached nowhere",
        "kvroute prefixes list says where they are warm; a larger --pin-share",
    ),
    "evicted": Limit(
        0.2,
        "what was cached is no more: evicted, cleared, or lost with its replica",
        "more memory for caches, or more replicas; has one been cleared, or replaced?",
    ),
}


BROKEN_SHARE = 0.05
MOVE = "put what changes, such as dates and ids, behind what stays: into the last user message"
REMEDIES = {
    "tools": "send the same tools in the same order with each turn",
    "template": "does it move tools, or drop thoughts? chat_template_kwargs may keep them",
}
SLOW = (
    "requests avoid it already; look at its GPU's temperature and clocks (nvidia-smi -q -d "
    "PERFORMANCE) and at other programs on its machine, or replace it"
)
WHERE = {
    "system": "in the system message",
    "developer": "in the developer's message",
    "user": "in a user's message",
    "assistant": "in an assistant's message",
    "tool": "in a tool's result",
    "tools": "in the definitions of tools",
    "template": "while all messages stay",
}


def hits(found: Facts) -> Iterator[Check]:
    """found: the ledger of one router's requests in the last window_s seconds."""
    tokens, requests = found["tokens"], found["requests"]
    total = sum(tokens.values())
    if requests < FEW_REQUESTS:
        yield Check("hits", "ok", f"{requests} requests in {_minutes(found)}: too few to judge")
        return
    broken = list(_broken(tokens.get("broken", 0), found.get("broken") or (), total))
    yield from broken
    troubles = [cause for cause in LIMITS if tokens[cause] > LIMITS[cause].share * total]
    for cause in troubles:
        share, limit = tokens[cause] / total, LIMITS[cause]
        finding = f"{cause}: {share:.0%} of the prompts' tokens; {limit.meaning}"
        yield Check("hits", "warning", finding, limit.remedy)
    if not troubles and not broken:
        yield Check("hits", "ok", _shares(tokens, total) + f", of {total:,} in {_minutes(found)}")


def _broken(tokens: int, places: Sequence[Facts], total: int) -> Iterator[Check]:
    """places: where chats change, the costliest first."""
    notable = [place for place in places if place["tokens"] > BROKEN_SHARE * total]
    for place in notable:
        share = f"{place['tokens'] / total:.0%} of prompt tokens were missed since chats change"
        remedy = REMEDIES.get(place["role"], MOVE)
        yield Check("hits", "warning", f"{share} {_where(place)}", remedy)
    if not notable and tokens > BROKEN_SHARE * total:
        share = f"{tokens / total:.0%} of prompt tokens were missed since chats change"
        yield Check("hits", "warning", f"{share} at many places before their end", MOVE)


def _where(place: Facts) -> str:
    kind = f": {place['kind']}" if place.get("kind") else ""
    return f"at token {place['token']:,}, {WHERE.get(place['role'], 'in a message')}{kind}"


def load(backlogs_s: Mapping[str, float]) -> Iterator[Check]:
    """backlogs_s: prefill queued or running on each replica."""
    if not backlogs_s:
        return
    median_s = statistics.median(backlogs_s.values())
    busy = {replica_id: s for replica_id, s in backlogs_s.items() if s > LONG_S}
    if median_s > LONG_S:
        finding = f"half of the replicas have {median_s:.0f} s of prefill queued, or more"
        yield Check("load", "warning", finding, BIGGER)
        return
    for replica_id, backlog_s in busy.items():
        finding = f"replica {replica_id} has {backlog_s:.0f} s of prefill queued"
        finding += f", half of the fleet no more than {median_s:.1f} s"
        remedy = "kvroute explain says why a prompt goes there; is it slower than the others?"
        yield Check("load", "warning", finding, remedy)
    if not busy:
        longest_s = max(backlogs_s.values())
        yield Check("load", "ok", f"{longest_s:.1f} s of prefill in the longest queue")


def speeds(slow: Mapping[str, float]) -> Iterator[Check]:
    """Judge the replicas' speeds.

    Args:
        slow: replicas that the router found to be far slower than the others, and how many times.
    """
    for replica_id, times in slow.items():
        finding = f"replica {replica_id} computes prompts {times:.1f} times as slowly as the others"
        yield Check("speed", "warning", finding, SLOW)
    if not slow:
        yield Check("speed", "ok", "no replica is far slower than the others")


def is_busy(backlogs_s: Mapping[str, float], found: Iterable[Facts]) -> bool:
    """Whether requests wait since the whole fleet computes. found: as for `queues`."""
    if backlogs_s and statistics.median(backlogs_s.values()) > LONG_S:
        return True
    return any(
        [*_waiting(queue), *_refused(queue)] or queue["recent"]["mean_s"] >= LONG_S
        for queue in found
    )


def queues(found: Iterable[Facts]) -> Iterator[Check]:
    """found: what waits in one router, and what did in the last minutes, for each model."""
    for queue in found:
        troubles = [*_waiting(queue), *_refused(queue)]
        yield from troubles or [_have_waited(queue)]


def _waiting(queue: Facts) -> Iterator[Check]:
    """Requests that only fill what others leave are not told: they are there to wait."""
    here, everywhere = queue["lines"]["default"], queue["all_routers"]["requests"]
    if here["oldest_s"] < LONG_WAIT_S:
        return
    finding = f"{_plural(here['requests'], 'request')} for {queue['model']} held back while every "
    finding += f"replica is busy: {here['prefill_s']:.0f} s of prefill, the oldest for "
    finding += f"{here['oldest_s']:.0f} s"
    if everywhere > queue["requests"]:
        finding += f"; {everywhere:,} in all routers"
    yield Check("queue", "warning", finding, BIGGER)


def _refused(queue: Facts) -> Iterator[Check]:
    """Those that would have waited too long, or did."""
    refused = queue["recent"]["refused"]
    if not refused:
        return
    reasons = ", ".join(f"{n:,} {REFUSALS.get(reason, reason)}" for reason, n in refused.items())
    finding = f"{_plural(sum(refused.values()), 'request')} for {queue['model']} refused in "
    finding += f"{_minutes(queue['recent'])}: {reasons}"
    options = "--max-seat-wait-s" if refused.keys() == {"no_seat"} else "--max-wait-s"
    yield Check("queue", "warning", finding, f"{BIGGER}; a larger {options} for more patience")


def _have_waited(queue: Facts) -> Check:
    if queue["recent"]["mean_s"] < LONG_S:
        return Check("queue", "ok", _waited(queue))
    return Check("queue", "warning", _waited(queue), BIGGER)


def _waited(queue: Facts) -> str:
    recent, minutes = queue["recent"], _minutes(queue["recent"])
    if not recent["waited"]:
        return f"no request for {queue['model']} had to wait for a replica in {minutes}"
    finding = f"{_plural(recent['waited'], 'request')} for {queue['model']} had to wait for a "
    finding += f"replica in {minutes}: {recent['mean_s']:.1f} s on average, "
    return finding + f"{recent['longest_s']:.1f} s at most"


def _shares(tokens: Mapping[str, int], total: int) -> str:
    cached = (tokens["hit"] + tokens["unexpected_hit"]) / total
    missed = [cause for cause, n in tokens.items() if n and cause not in ("hit", "unexpected_hit")]
    missed.sort(key=lambda cause: -tokens[cause])
    each = [f"{cause} {tokens[cause] / total:.0%}" for cause in missed]
    return ", ".join([f"{cached:.0%} of prompt tokens from a cache", *each])


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _minutes(found: Facts) -> str:
    return f"{found['window_s'] / 60:.0f} minutes"
