"""What is right, odd or wrong with what a cluster told: no network, no clock."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from router.command.embedded_redis import OLDEST
from router.command.ray_cluster import last_line

Grade = Literal["ok", "warning", "wrong"]
Facts = Mapping[str, Any]

SAFE_POLICY = "noeviction"
FULL = 0.9  # of Redis's memory
SLOW_REDIS_S = 0.05  # a round trip; a change takes one to be written and one to be read
LATE_LEASE_S = 1.0  # a third of it: it was to be renewed twice since

RESTART = "restart the replica with the router's model files and settings"
HEALS = "ask again: what can heal has healed within seconds; if it stays, restart the replica"
CANARY_REMEDIES = {
    "no answer": "see its log, and what it runs: kvroute status; one that hangs is replaced",
    "not in the index": "see its log, and whether Redis can be reached from its node",
    "nothing published": "see its log: its engine tells it nothing, or Redis takes nothing from it",
    "other fingerprints": f"its fingerprints are made otherwise: {RESTART}",
    "not in the mirror": "see the router's log; is it short of CPU? kvroute_index_age_seconds",
}
ACCOUNTS = {"engine": "the engine", "replica": "the replica", "redis": "Redis"}  # and a router's


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    grade: Grade
    finding: str
    remedy: str = ""  # empty where nothing is wrong


def cluster(health: Facts) -> Check:
    ready = health["replicas"]
    if ready:
        return Check("cluster", "ok", f"{ready} replicas are ready")
    return Check("cluster", "wrong", "no replica is ready", "see the output of kvroute serve")


def handshake(health: Facts) -> Iterator[Check]:
    """Do replicas and router read a text as the same tokens, and tokens as the same blocks?"""
    degraded: Mapping[str, str] = health.get("degraded") or {}
    if not degraded:
        yield Check("handshake", "ok", "no replica contradicts the router")
    for replica_id, reason in degraded.items():
        yield Check("handshake", "wrong", f"replica {replica_id}: {reason}", RESTART)


def deployments(found: Mapping[str, Facts] | None) -> Iterator[Check]:
    """What Serve wants to run, and what runs."""
    if found is None:
        remedy = "requests go on, but nothing that dies is replaced: see Serve's log on the head"
        yield Check("serve", "wrong", "Serve's controller does not answer", remedy)
        return
    counts = {name: _count(deployment["replicas"]) for name, deployment in found.items()}
    troubled = {name: each for name, each in found.items() if each["status"] != "HEALTHY"}
    if not troubled:
        yield Check("serve", "ok", "; ".join(f"{name}: {counts[name]}" for name in counts))
    for name, each in troubled.items():
        is_moving = each["status"] in ("UPDATING", "UPSCALING", "DOWNSCALING")
        said = f". {last_line(each['message'])}" if each["message"] else ""
        finding = f"{name} is {each['status']}: {counts[name]}{said}"
        remedy = "wait, and ask again" if is_moving else "see what Serve says, and its log"
        yield Check("serve", "warning" if is_moving else "wrong", finding, remedy)


def redis(found: Facts) -> Iterator[Check]:
    if "error" in found:
        finding = f"Redis is away: {found['error']}"
        remedy = "start it, or let the routers reach it; requests go on, and are placed less well"
        yield Check("redis", "wrong", finding, remedy)
        return
    troubles = [*_redis_troubles(found)]
    yield from troubles
    if not troubles:
        used = f"{found['used_bytes'] / 1e6:.1f} MB"
        answers = f"answers in {found['answers_in_s'] * 1000:.1f} ms"
        finding = f"Redis {found['version']}, {found['maxmemory_policy']}, {used}, {answers}"
        yield Check("redis", "ok", finding)


def _redis_troubles(found: Facts) -> Iterator[Check]:
    version, policy = found["version"], found["maxmemory_policy"]
    used, limit, answers_in_s = found["used_bytes"], found["maxmemory_bytes"], found["answers_in_s"]
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        yield Check("redis", "wrong", f"Redis {version} is too old", "run Redis 6.2 or newer")
    if policy != SAFE_POLICY:  # volatile-* too: all our keys have leases
        finding = f"maxmemory-policy is {policy}: Redis may drop parts of the index"
        yield Check("redis", "wrong", finding, f"CONFIG SET maxmemory-policy {SAFE_POLICY}")
    if limit and used > FULL * limit:
        finding = f"{used / 1e6:.1f} of {limit / 1e6:.1f} MB are used; a full Redis takes no writes"
        yield Check("redis", "warning", finding, "raise maxmemory")
    if answers_in_s > SLOW_REDIS_S:
        finding = f"it took Redis {answers_in_s * 1000:.0f} ms to answer"
        remedy = "routers know of blocks that much later: a nearer Redis, or more CPU for it"
        yield Check("redis", "warning", finding, remedy)


def leases(running: Iterable[str], left_s: Mapping[str, float] | None) -> Iterator[Check]:
    """left_s: that each replica's lease still runs; None, and nothing to judge, without Redis."""
    if left_s is None:
        return
    missing = sorted(set(running) - left_s.keys())
    late = {replica_id: left for replica_id, left in left_s.items() if left < LATE_LEASE_S}
    for replica_id in missing:
        finding = f"replica {replica_id} runs and has no lease: its cache is unknown"
        yield Check("leases", "wrong", finding, CANARY_REMEDIES["not in the index"])
    for replica_id, left in late.items():
        finding = f"the lease of replica {replica_id} runs out in {left:.1f} s, renewals are late"
        remedy = "more CPU for it or for Redis; ask again: one that died is gone in seconds"
        yield Check("leases", "warning", finding, remedy)
    if not missing and not late:
        shortest = f", and runs {min(left_s.values()):.1f} s more at least" if left_s else ""
        yield Check("leases", "ok", f"each of {len(left_s)} replicas has one{shortest}")


def haproxy(serve: Facts) -> Check:
    if not serve["haproxy"]:
        finding = "HAProxy is off: Serve's own proxy takes the requests, which costs throughput"
        remedy = "RAY_SERVE_ENABLE_HA_PROXY=1 on every node before Ray starts, as in deploy/node.sh"
        return Check("haproxy", "warning", finding, remedy)
    if not serve["came_through_haproxy"]:
        finding = "HAProxy is on, but this request came through Serve's own proxy"
        remedy = "see HAProxy's log among Serve's logs on the head; is it installed there?"
        return Check("haproxy", "warning", finding, remedy)
    if not serve["throughput_optimized"]:
        finding = "HAProxy takes the requests; Serve is not in its throughput mode"
        remedy = "RAY_SERVE_THROUGHPUT_OPTIMIZED=1 on every node before Ray starts"
        return Check("haproxy", "warning", finding, remedy)
    return Check("haproxy", "ok", "HAProxy takes the requests, Serve is in its throughput mode")


def versions(installed: Mapping[str, str], ours: str, nodes: Sequence[str] | None) -> Check:
    """installed: by package, at the router. ours: this command's kvroute."""
    where = f"; nodes: {len(nodes)}" if nodes else ""
    finding = ", ".join(f"{name} {version}" for name, version in installed.items()) + where
    if installed.get("kvroute") == ours:
        return Check("versions", "ok", finding)
    remedy = "use the cluster's version here: a doctor knows no other version's troubles"
    return Check("versions", "warning", f"{finding}; this command is kvroute {ours}", remedy)


def canary(replicas: Sequence[Facts], router: str) -> Iterator[Check]:
    """What came of a tiny request to each replica."""
    seen = [each for each in replicas if each["cause"] is None]
    unseen = [each for each in replicas if each["cause"] == "Redis is away"]
    if seen:
        slowest = max(each["answered_s"] + each["seen_s"] for each in seen)
        finding = (
            f"answered by {len(seen)} replicas, and their blocks seen in Redis and router {router} "
            f"within {slowest * 1000:.0f} ms"
        )
        yield Check("canary", "ok", finding)
    if unseen:
        finding = f"answered by {len(unseen)} replicas; without Redis nobody sees their blocks"
        yield Check("canary", "warning", finding, "see to Redis")
    for each in replicas:
        if each not in seen and each not in unseen:
            yield _lost_canary(each)


def _lost_canary(found: Facts) -> Check:
    name, cause = f"canary of {found['id']}", found["cause"]
    if cause == "caching is off":
        return Check(name, "ok", f"answered in {found['answered_s'] * 1000:.0f} ms; {cause}")
    blocks = found["blocks"]
    counts = (
        f"of {blocks['expected']} blocks {_known(blocks['redis'])} in Redis, "
        f"{blocks['mirror']} in the router"
    )
    finding = ": ".join(filter(None, (cause, found["detail"])))
    if cause != "no answer":
        finding += f"; {counts}"
    return Check(name, "wrong", finding, CANARY_REMEDIES[cause])


def audit(replica: Facts, router: str) -> Check:
    """What an audit by that router says of one replica."""
    who = ACCOUNTS | {"mirror": f"router {router}"}
    counts = [f"{who[account]} {_known(count)}" for account, count in replica["blocks"].items()]
    wrong = [
        f"no answer from {who[account]}" if count is None else f"drift of {count} in {who[account]}"
        for account, count in replica["drift"].items()
        if count != 0
    ]
    finding = f"{', '.join(wrong) or 'no drift'}; blocks: {', '.join(counts)}"
    name = f"audit of {replica['id']}"
    return Check(name, "wrong", finding, HEALS) if wrong else Check(name, "ok", finding)


def _known(count: int | None) -> str:
    return "?" if count is None else str(count)


def _count(states: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state.lower()}" for state, count in states.items()) or "none"
