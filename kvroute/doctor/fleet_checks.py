"""Checks whether the fleet is whole: its replicas, routers and connections."""

from collections.abc import Iterator, Mapping, Sequence

from kvroute.blocks.cache_groups import UNKNOWN_LAYOUT
from kvroute.deployments import kind_of, of_model, progress_in, start_error
from kvroute.doctor.checks import RESTART, Check, Facts

MAX_NAMED = 5  # the most replicas that are named in a list
WAIT = (
    "wait, then run the doctor again; if nothing has changed, see the logs of the replicas, whose "
    "folder kvroute serve prints"
)
BY_LOAD = "routers send requests to this replica by its load only, without regard to its cache"
STARTED = {"RUNNING", "STARTING"}  # Serve's states of replicas that have started, or will have


def cluster(health: Facts) -> Check:
    """Check that all wanted replicas are ready."""
    if not health["replicas"]:
        return Check("cluster", "wrong", ready(health), "see the output of kvroute serve")
    if health.get("missing"):
        return Check("cluster", "warning", ready(health), WAIT)
    return Check("cluster", "ok", ready(health))


def ready(health: Facts) -> str:
    """Return a text: how many replicas are ready and wanted, and which ones are missing."""
    count, wanted = health["replicas"], health.get("wanted")
    of_wanted = f" of {wanted}" if wanted is not None else ""
    are = "replica is" if (wanted is None and count == 1) or wanted == 1 else "replicas are"
    by_state = dict[str, list[str]]()
    for replica_id, state in sorted((health.get("missing") or {}).items()):
        by_state.setdefault(state, []).append(replica_id)
    missing = [f"{state}: {_some(ids)}" for state, ids in by_state.items()]
    return "; ".join([f"{count}{of_wanted} {are} ready", *missing])


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else ""
    return ", ".join(ids[:MAX_NAMED]) + more


def handshake(health: Facts) -> Iterator[Check]:
    """Check that replicas and router compute the same tokens and fingerprints from a text."""
    degraded: Mapping[str, str] = health.get("degraded") or {}
    if not degraded:
        yield Check("handshake", "ok", "all replicas are compatible with the router")
    for replica_id, reason in degraded.items():
        remedy = BY_LOAD if reason.startswith(UNKNOWN_LAYOUT) else RESTART
        yield Check("handshake", "wrong", f"replica {replica_id}: {reason}", remedy)


def connections(health: Facts) -> Iterator[Check]:
    """Check that the router has a connection to each replica that Serve runs."""
    unconnected: Mapping[str, str] = health.get("unconnected") or {}
    if not unconnected:
        yield Check("connections", "ok", "the router is connected to every replica")
    for replica_id, reason in unconnected.items():
        finding = f"no connection to replica {replica_id}: {reason}"
        remedy = "open the ports of --replica-ports on the replicas' nodes to routers"
        yield Check("connections", "wrong", finding, remedy)


def servers(lost: Mapping[str, str]) -> Iterator[Check]:
    """Check that requests can be sent to all attached servers, which the user runs.

    Args:
        lost: Server -> why no requests can be sent to it, and what to do.
    """
    for problem in lost.values():
        finding, _, remedy = problem.partition("; ")
        yield Check("servers", "wrong", f"your server {finding}", remedy or "see its log")


def deployments(states: Mapping[str, Facts] | None, lost_servers: int = 0) -> Iterator[Check]:
    """Compare the deployments' actual states in Serve with their target states.

    Args:
        states: The deployments; None: Serve's controller does not answer.
        lost_servers: The attached servers to which no requests can be sent. Their replicas may wait
            in their start, which is no problem of the deployment.
    """
    if states is None:
        remedy = (
            "requests are served, but failed processes are not replaced; see Serve's log on the "
            "head node"
        )
        yield Check("serve", "wrong", "Serve's controller does not answer", remedy)
        return
    counts = {
        name: f"{kind_of(name)}s{of_model(name)}: {_count(state['replicas'])}"
        for name, state in states.items()
    }
    unhealthy = {
        name: state
        for name, state in states.items()
        if state["status"] != "HEALTHY" and not _only_waits(name, state["replicas"], lost_servers)
    }
    if not unhealthy:  # the check `cluster` says which replicas are ready
        others = [counts[name] for name in states if not kind_of(name).endswith("replica")]
        yield Check("serve", "ok", "; ".join(["Ray Serve reports no problem", *others]))
    for name, state in unhealthy.items():
        if error := start_error(state["message"]):
            finding = f"a {kind_of(name)}{of_model(name)} cannot start: {error}"
            yield Check("serve", "wrong", finding, "correct this; Ray Serve tries it again")
        else:
            said = filter(None, [counts[name], progress_in(state["message"])])
            yield Check("serve", "warning", "; ".join(said), WAIT)


def _only_waits(name: str, replicas: Mapping[str, int], lost_servers: int) -> bool:
    """Return whether all replicas run, except those that wait for a lost server."""
    missing = sum(replicas.values()) - replicas.get("RUNNING", 0)
    return kind_of(name) == "replica" and replicas.keys() <= STARTED and missing <= lost_servers


def _count(states: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state.lower()}" for state, count in states.items()) or "none"
