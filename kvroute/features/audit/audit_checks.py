"""The doctor's checks of canaries and audits."""

from collections.abc import Iterator

from kvroute.contract.ranks import replicas_of
from kvroute.doctor.checks import RESTART, UNREGISTERED, Check, Facts

HEALS = "repeat the audit, as most drift is repaired in seconds; if it stays, restart the replica"
CANARY_REMEDIES = {  # why a canary, a small test request, was lost -> remedy
    "no answer": "see the replica's log, and its load in kvroute status; if it hangs, Serve "
    "replaces it",
    "not in the index": UNREGISTERED,
    "nothing published": "see the replica's log: its engine publishes no events, or Redis refuses "
    "its writes",
    "other fingerprints": f"replica and router compute different fingerprints: {RESTART}",
    "not in the mirror": "see the router's log and kvroute_index_age_seconds; give the router more "
    "CPU",
}
# Sources of the block counts that an audit compares -> their names in findings.
ACCOUNTS = {"engine": "the engine", "replica": "the replica", "redis": "Redis"}


def canaries(body: Facts) -> Iterator[Check]:
    """Check the results of the canaries: one small test request to each replica.

    Each canary has a new prompt, whose blocks must appear in Redis and in the router.

    Args:
        body: The router's id, and the results by rank (canaries.py: report).
    """
    replicas, router = body["replicas"], body["router"]
    complete = [replica for replica in replicas if replica["cause"] is None]
    without_redis = [replica for replica in replicas if replica["cause"] == "Redis is away"]
    answered, unseen = (
        len(replicas_of(rank["id"] for rank in ranks)) for ranks in (complete, without_redis)
    )
    if complete:
        slowest_s = max(replica["answered_s"] + replica["seen_s"] for replica in complete)
        finding = (
            f"answered by {answered} replicas, whose new blocks were seen in Redis and "
            f"router {router} within {slowest_s * 1000:.0f} ms"
        )
        yield Check("canary", "ok", finding)
    if without_redis:
        finding = f"answered by {unseen} replicas; without Redis their new blocks cannot be seen"
        yield Check("canary", "warning", finding, "follow the remedy of the check `redis`")
    for replica in replicas:
        if replica not in complete and replica not in without_redis:
            yield _lost_canary(replica)


def _lost_canary(replica: Facts) -> Check:
    name, cause = f"canary of {replica['id']}", replica["cause"]
    if cause == "caching is off":
        return Check(name, "ok", f"answered in {replica['answered_s'] * 1000:.0f} ms; {cause}")
    blocks = replica["blocks"]
    counts = (
        f"of {blocks['expected']} blocks {_known(blocks['redis'])} in Redis, "
        f"{blocks['mirror']} in the router"
    )
    finding = ": ".join(filter(None, (cause, replica["detail"])))
    if cause != "no answer":
        finding += f"; {counts}"
    return Check(name, "wrong", finding, CANARY_REMEDIES[cause])


def audits(body: Facts) -> Iterator[Check]:
    """Check the results of an audit of all replicas.

    An audit compares the blocks that the engine has cached with those that the replica, Redis and
    the router list for it. The number of wrong blocks in a list is its drift.

    Args:
        body: The router's id, and the results by rank (router_audits.py: _report).
    """
    names = ACCOUNTS | {"mirror": f"router {body['router']}"}
    for replica in body["replicas"]:
        counts = [f"{names[list_]} {_known(count)}" for list_, count in replica["blocks"].items()]
        wrong = [
            f"no answer from {names[list_]}"
            if count is None
            else f"drift of {count} in {names[list_]}"
            for list_, count in replica["drift"].items()
            if count != 0
        ]
        finding = f"{', '.join(wrong) or 'no drift'}; blocks: {', '.join(counts)}"
        if in_host := replica.get("in_host"):
            finding += f"; {in_host['blocks']['engine']} blocks of the engine are in host memory"
            finding += f", with a drift of {in_host['drift']}" * bool(in_host["drift"])
        name = f"audit of {replica['id']}"
        yield Check(name, "wrong", finding, HEALS) if wrong else Check(name, "ok", finding)


def _known(count: int | None) -> str:
    return "?" if count is None else str(count)
