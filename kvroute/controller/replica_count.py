"""Changes the number of replicas of a running cluster, for `kvroute scale`."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvroute.controller.ray_connection import connected
from kvroute.deployments import APPLICATION, OWN_REPLICAS, deployment, progress_in, start_error
from kvroute.local.progress import StartProgress

POLL_S = 0.2  # seconds between two queries of the deployment's state


class ScaleError(RuntimeError):
    """The requested number of replicas cannot be reached. The message says what to do."""


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """The state of the replicas in Serve's controller."""

    target: int  # number of replicas that Serve tries to reach
    states: Mapping[str, int]  # state, such as "STARTING" or "RUNNING" -> number of replicas
    message: str  # why the number differs from the target, if Serve knows
    per_replica: Mapping[str, float]  # Ray resource of one replica, such as CPU or GPU -> amount
    bounds: tuple[int, int] | None = None  # limits of the target in autoscaling; None: it is off


def scale(
    replicas: int,
    model: str | None,
    ray_address: str,
    progress: StartProgress,
    *,
    is_attached: bool,
) -> None:
    """Change the number of replicas, and wait until the change is complete.

    It is complete when new replicas are ready, and removed replicas have finished their requests.

    Args:
        replicas: The new number of replicas.
        model: Name of the model; None if there is only one.
        ray_address: Address of the cluster's Ray.
        progress: Prints the states of the replicas.
        is_attached: Whether the cluster has attached servers.

    Raises:
        ScaleError: Ray has too few resources, another user has changed the target meanwhile,
            autoscaling is on, or all replicas are those of attached servers.
        UnreachableError: The cluster's Ray cannot be reached.
    """
    with connected(ray_address):
        import ray

        from kvroute.process.ray_internals import set_replicas

        name = _scaled(model, is_attached=is_attached)
        deployed = _deployed(name)
        check_not_autoscaling(deployed)
        check_resources(replicas, deployed, ray.available_resources())
        set_replicas(APPLICATION, name, replicas)
        _wait(replicas, name, progress)


def _scaled(model: str | None, *, is_attached: bool) -> str:
    """Return the name of the deployment to scale.

    With attached servers, it is the deployment of kvroute's own replicas.

    Raises:
        ScaleError: All replicas are attached servers.
    """
    try:
        _deployed(OWN_REPLICAS)
    except LookupError:
        if is_attached:
            raise ScaleError(
                "all replicas are attached servers, so their number cannot be set; to add or "
                "remove servers, change the file of --attach-file, or restart with other "
                "addresses; to scale kvroute's own replicas beside them, restart with "
                "--own-replicas"
            ) from None
        return deployment(model)
    return OWN_REPLICAS


def check_not_autoscaling(deployed: ReplicaCounts) -> None:
    """Raise ScaleError if autoscaling is on, because it would undo the change."""
    if deployed.bounds:
        minimum, maximum = deployed.bounds
        raise ScaleError(
            f"autoscaling is on: {deployed.target} replicas now, {minimum} to {maximum} allowed. "
            "To set the number by hand, restart without --max-replicas"
        )


def check_resources(replicas: int, deployed: ReplicaCounts, free: Mapping[str, float]) -> None:
    """Raise ScaleError if Ray has too few resources for this number of replicas."""
    running = sum(deployed.states.values())  # with stopping replicas, which will free resources
    for name, amount in deployed.per_replica.items():
        maximum = running + int(free.get(name, 0.0) // amount) if amount else replicas
        if replicas > maximum:
            raise ScaleError(
                f"{replicas} replicas need {amount:g} {name} each: {running} run and "
                f"{free.get(name, 0.0):g} {name} are free, so at most {maximum} fit; add a machine "
                "for more"
            )


def describe(deployed: ReplicaCounts) -> str:
    """Return a line for the terminal about the state of the replicas."""
    ready = deployed.states.get("RUNNING", 0)
    line = f"{min(ready, deployed.target)} of {deployed.target} replicas ready"
    if ready > deployed.target:
        line += f", {ready - deployed.target} to be removed"
    if finishing := deployed.states.get("STOPPING", 0):
        line += f", {finishing} draining (for --drain-timeout-s at most)"
    reason = start_error(deployed.message) or progress_in(deployed.message)
    if reason and ready < deployed.target:
        line += f"; {reason}"
    return line


def _wait(replicas: int, name: str, progress: StartProgress) -> None:
    shown = ""
    while True:
        deployed = _deployed(name)
        if deployed.target != replicas:
            raise ScaleError(
                f"another user has set the number to {deployed.target}, and this command has "
                f"stopped; run it again to set {replicas}"
            )
        if (line := describe(deployed)) != shown:
            progress.step(line)
            shown = line
        if deployed.states == {"RUNNING": replicas}:
            return
        time.sleep(POLL_S)


def _deployed(name: str) -> ReplicaCounts:
    from kvroute.process.ray_internals import deployments

    details = deployments(APPLICATION)[name]
    limits = details["deployment_config"].get("autoscaling_config")
    return ReplicaCounts(
        target=details["target_num_replicas"],
        states=Counter(str(replica["state"].value) for replica in details["replicas"]),
        message=details["message"],
        per_replica=details["required_resources"],
        bounds=(limits["min_replicas"], limits["max_replicas"]) if limits else None,
    )
