"""A cluster's own data is graded as ok, warning or wrong, without network or clock."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvroute.blocks.cache_groups import UNTOLD
from kvroute.contract.ranks import replicas_of
from kvroute.deployments import last_line
from kvroute.local.ports import is_local
from kvroute.store.connection import OLDEST_REDIS

Grade = Literal["ok", "warning", "wrong"]
Facts = Mapping[str, Any]

SAFE_POLICY = "noeviction"
FULL = 0.9  # of Redis's memory
SLOW_REDIS_S = 0.05  # one round trip; a change takes one to be written and one to be read
LATELY_S = 60.0  # older unreadable records are ignored
LATE_LEASE_S = 1.0  # a third of the lease: two renewals are missing

RESTART = "restart the replica with the router's model files and settings"
BY_LOAD = "its requests are routed by load, and nothing is expected of its cache"
HEALS = "ask again: what can heal has healed within seconds; if it stays, restart the replica"
CANARY_REMEDIES = {
    "no answer": "see its log, and what it runs: kvroute status; one that hangs is replaced",
    "not in the index": "see its log, and whether Redis can be reached from its node",
    "nothing published": "see its log: its engine tells it nothing, or Redis takes nothing from it",
    "other fingerprints": f"its fingerprints are made otherwise: {RESTART}",
    "not in the mirror": "see the router's log; is it short of CPU? kvroute_index_age_seconds",
}
FOREIGN = "who else writes to this Redis? give each cluster a --cluster of its own"
UNREADABLE_REMEDIES = {
    "replica": f"restart the replica with the router's version; if it is not ours: {FOREIGN}",
    "router": f"restart that router with this one's version; if it is not ours: {FOREIGN}",
    "message": f"are all routers of one version? {FOREIGN}",
    "change": FOREIGN,
    "blocks": FOREIGN,
    "prefix": "declare it again, or drop it: kvroute prefixes remove ID",
    "audit": "restart the replica with the router's version",
    "cluster": "nothing: it is skipped, and goes by itself",
    "account": f"what it counted is lost; {FOREIGN}",
    "response": f"its conversation cannot go on; are all routers of one version? {FOREIGN}",
}
ACCOUNTS = {"engine": "the engine", "replica": "the replica", "redis": "Redis"}  # and a router's


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    grade: Grade
    finding: str
    remedy: str = ""  # empty when nothing is wrong


def cluster(health: Facts) -> Check:
    ready = health["replicas"]
    if ready:
        return Check("cluster", "ok", f"{ready} replicas are ready")
    return Check("cluster", "wrong", "no replica is ready", "see the output of kvroute serve")


def handshake(health: Facts) -> Iterator[Check]:
    """Whether replicas and router derive the same tokens from a text, and the same blocks."""
    degraded: Mapping[str, str] = health.get("degraded") or {}
    if not degraded:
        yield Check("handshake", "ok", "no replica contradicts the router")
    for replica_id, reason in degraded.items():
        remedy = BY_LOAD if reason.startswith(UNTOLD) else RESTART
        yield Check("handshake", "wrong", f"replica {replica_id}: {reason}", remedy)


def connections(health: Facts) -> Iterator[Check]:
    """Whether the router can send requests to each replica that Serve runs."""
    unconnected: Mapping[str, str] = health.get("unconnected") or {}
    if not unconnected:
        yield Check("connections", "ok", "the router is connected to every replica")
    for replica_id, reason in unconnected.items():
        finding = f"no connection to replica {replica_id}: {reason}"
        remedy = "let routers reach the replicas' nodes; --replica-ports says at which ports"
        yield Check("connections", "wrong", finding, remedy)


def blamed(found: Sequence[Facts]) -> Check:
    """Requests that stopped a replica. found: the model, the age and the reason of each."""
    if not found:
        return Check("requests", "ok", "no request has stopped a replica lately")
    last = min(found, key=lambda each: float(each["age_s"]))
    finding = f"{len(found)} kinds of requests for {last['model']} are refused for some minutes; "
    finding += f"the last one since {last['age_s']:.0f} s: {last['why']}"
    remedy = "the router's log has the request's id; its client should send something smaller"
    return Check("requests", "warning", finding, remedy)


def deployments(found: Mapping[str, Facts] | None) -> Iterator[Check]:
    """The deployments' target and actual states in Serve."""
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
        finding = f"Redis is away or refuses writes: {found['error']}"
        remedy = (
            "start it, let the routers reach it, or mend what it says; requests go on, and are "
            "placed less well"
        )
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
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
        yield Check("redis", "wrong", f"Redis {version} is too old", "run Redis 6.2 or newer")
    if policy != SAFE_POLICY:  # also volatile-*: all keys have leases
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
    """left_s: the remaining lease of each replica; None without Redis, then there is no check."""
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


def clusters(found: Sequence[Facts] | None) -> Iterator[Check]:
    """found: for each model, this cluster and the others in its Redis; None without Redis, then
    there is no check."""
    for each in found or ():
        own, others = each["own"], each["others"]
        twins = [other for other in others if other["is_twin"]]
        for twin in twins:
            finding = (
                f"another cluster named {own['cluster']!r} serves {own['model']} through this "
                f"Redis: Ray at {twin['ray_address']}, ours at {own['ray_address']}; they mix"
            )
            remedy = "give each a --cluster of its own; one that stopped is forgotten in 30 s"
            yield Check("clusters", "warning", finding, remedy)
        names = sorted({repr(other["cluster"]) for other in others if not other["is_twin"]})
        finding = f"this is {own['cluster']!r}"
        if names:
            finding += f"; {own['model']} is served through this Redis by {', '.join(names)} too"
            finding += ", separately"
        if names or not twins:
            yield Check("clusters", "ok", finding)


def records(unreadable: Sequence[Facts]) -> Iterator[Check]:
    """unreadable: the items that the router skipped since its start, by model and kind."""
    fresh = [each for each in unreadable if each["age_s"] < LATELY_S]
    for each in fresh:
        finding = (
            f"{each['kind']} {each['last']!r} of {each['model']} cannot be read: {each['reason']}; "
            f"{each['count']} times so far"
        )
        yield Check("records", "warning", finding, UNREADABLE_REMEDIES[each["kind"]])
    if not fresh:
        finding = "everything in Redis can be read"
        if count := sum(each["count"] for each in unreadable):
            finding += f"; {count} times since the router's start something could not"
        yield Check("records", "ok", finding)


def rendering(differences: Mapping[str, int]) -> Check:
    """differences: prompts that routers have rendered in another way than vLLM, by replica."""
    total = sum(differences.values())
    if not total:
        return Check("rendering", "ok", "routers render prompts as vLLM does, as far as checked")
    finding = (
        f"{total} of the prompts that replicas checked were rendered in another way by routers"
    )
    remedy = "the replicas' logs name the requests; report them with the model's chat template"
    return Check("rendering", "wrong", finding, remedy)


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


def access(found: Facts) -> Check:
    """Who is let in. host: null where Serve's controller did not answer."""
    host, problem = found["host"], found["problem"]
    if problem:
        finding = f"the API keys stay as they were: {problem}"
        return Check("access", "wrong", finding, "mend the file; kvroute keys list --file reads it")
    if found["has_keys"]:
        return Check("access", "ok", "API keys are needed")
    if host and is_local(host):
        return Check("access", "ok", "no API keys are needed, and nobody else reaches the endpoint")
    where = host or "its address, which Serve's controller does not tell,"
    finding = f"no API keys: everybody who reaches {where} can use, watch and change the cluster"
    remedy = "give --api-keys (docs/security.md), or let only your own network reach the port"
    return Check("access", "warning", finding, remedy)


def versions(installed: Mapping[str, str], ours: str, nodes: Sequence[str] | None) -> Check:
    """installed: the router's versions by package. ours: this command's version of kvroute."""
    where = f"; nodes: {len(nodes)}" if nodes else ""
    finding = ", ".join(f"{name} {version}" for name, version in installed.items()) + where
    if installed.get("kvroute") == ours:
        return Check("versions", "ok", finding)
    remedy = "use the cluster's version here: a doctor knows no other version's troubles"
    return Check("versions", "warning", f"{finding}; this command is kvroute {ours}", remedy)


def canary(replicas: Sequence[Facts], router: str) -> Iterator[Check]:
    """The results of one small request to each replica."""
    seen = [each for each in replicas if each["cause"] is None]
    unseen = [each for each in replicas if each["cause"] == "Redis is away"]
    if seen:
        slowest = max(each["answered_s"] + each["seen_s"] for each in seen)
        finding = (
            f"answered by {_replicas(seen)} replicas, and their blocks seen in Redis and router "
            f"{router} within {slowest * 1000:.0f} ms"
        )
        yield Check("canary", "ok", finding)
    if unseen:
        finding = (
            f"answered by {_replicas(unseen)} replicas; without Redis their blocks are unknown"
        )
        yield Check("canary", "warning", finding, "see to Redis")
    for each in replicas:
        if each not in seen and each not in unseen:
            yield _lost_canary(each)


def _replicas(found: Sequence[Facts]) -> int:
    """How many there are; each rank has had its canary."""
    return len(replicas_of(each["id"] for each in found))


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
    """The result of that router's audit of one replica."""
    who = ACCOUNTS | {"mirror": f"router {router}"}
    counts = [f"{who[account]} {_known(count)}" for account, count in replica["blocks"].items()]
    wrong = [
        f"no answer from {who[account]}" if count is None else f"drift of {count} in {who[account]}"
        for account, count in replica["drift"].items()
        if count != 0
    ]
    finding = f"{', '.join(wrong) or 'no drift'}; blocks: {', '.join(counts)}"
    if in_host := replica.get("in_host"):
        finding += f"; {in_host['blocks']['engine']} of the engine's are in host memory"
        finding += f", with a drift of {in_host['drift']}" * bool(in_host["drift"])
    name = f"audit of {replica['id']}"
    return Check(name, "wrong", finding, HEALS) if wrong else Check(name, "ok", finding)


def _known(count: int | None) -> str:
    return "?" if count is None else str(count)


def _count(states: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state.lower()}" for state, count in states.items()) or "none"
