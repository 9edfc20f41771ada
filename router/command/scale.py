"""`kvroute scale`: more replicas or fewer, in a cluster that runs and loses no request over it."""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from router.command.progress import Progress
from router.command.ray_cluster import APPLICATION, deployment, last_line

POLL_S = 0.2


class ScaleError(RuntimeError):
    """So many replicas cannot be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """The replicas as Serve's controller sees them."""

    wanted: int
    states: Mapping[str, int]  # STARTING, RUNNING, STOPPING and the like -> replicas
    message: str  # why it is not as wanted, where Serve knows
    each: Mapping[str, float]  # what Ray sets aside for one replica: CPU, GPU -> amount
    bounds: tuple[int, int] | None = None  # least and most, where the fleet finds its own size


def scale(replicas: int, model: str | None, ray_address: str, progress: Progress) -> None:
    """Returns when so many replicas are ready, and those taken away have finished what they ran.

    model: whose replicas; None where there is one model only. Raises ScaleError when there is no
    room for so many, when somebody asked for another number meanwhile, and where the fleet finds
    its own size.
    """
    with _connected(ray_address):
        import ray

        name = deployment(model)
        deployed = _deployed(name)
        refuse_own_size(deployed)
        refuse_no_room(replicas, deployed, ray.available_resources())
        _ask_for(replicas, name)
        _wait(replicas, name, progress)


def refuse_own_size(deployed: Deployed) -> None:
    """Raises ScaleError where the load decides: it would undo what a person asks for."""
    if deployed.bounds:
        least, most = deployed.bounds
        raise ScaleError(
            f"the fleet finds its own size, now {deployed.wanted}, between {least} and {most} "
            "replicas; serve it with another --replicas or --max-replicas, or without the latter"
        )


def refuse_no_room(replicas: int, deployed: Deployed, free: Mapping[str, float]) -> None:
    """Raises ScaleError when Ray has too little left for so many."""
    there = sum(deployed.states.values())  # one that finishes makes room for another
    for name, amount in deployed.each.items():
        room = there + int(free.get(name, 0.0) // amount) if amount else replicas
        if replicas > room:
            raise ScaleError(
                f"{replicas} replicas of {amount:g} {name} are too many: {there} are there, and "
                f"{free.get(name, 0.0):g} {name} is free; {room} is the most, until a machine joins"
            )


def describe(deployed: Deployed) -> str:
    """What the fleet is, and what it waits for."""
    ready = deployed.states.get("RUNNING", 0)
    line = f"{ready} of {deployed.wanted} replicas ready"
    if finishing := deployed.states.get("STOPPING", 0):
        line += f", {finishing} taken away: finishing what they run, for --drain-timeout-s at most"
    if deployed.message:
        line += f"; {last_line(deployed.message)}"
    return line


def _wait(replicas: int, name: str, progress: Progress) -> None:
    shown = ""
    while True:
        deployed = _deployed(name)
        if deployed.wanted != replicas:
            raise ScaleError(f"somebody else asked for {deployed.wanted} replicas; it stays so")
        if (line := describe(deployed)) != shown:
            progress.step(line)
            shown = line
        if deployed.states == {"RUNNING": replicas}:
            return
        time.sleep(POLL_S)


@contextmanager
def _connected(ray_address: str) -> Iterator[None]:
    """This process is one of the cluster's drivers."""
    import ray
    from ray._private.authentication import authentication_token_setup as authentication

    logging.getLogger("ray").setLevel(logging.ERROR)
    authentication.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        ray.init(ray_address, log_to_driver=False, logging_level=logging.ERROR)
    except (ray.exceptions.RayError, RuntimeError, OSError) as error:
        raise ScaleError(
            f"the cluster's Ray at {ray_address} cannot be reached ({error}); "
            "say this on a machine of the cluster, as the user who started it"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _deployed(name: str) -> Deployed:
    details = _controller("get_serve_instance_details")
    found = details["applications"][APPLICATION]["deployments"][name]
    limits = found["deployment_config"].get("autoscaling_config")
    return Deployed(
        wanted=found["target_num_replicas"],
        states=Counter(str(replica["state"].value) for replica in found["replicas"]),
        message=found["message"],
        each=found["required_resources"],
        bounds=(limits["min_replicas"], limits["max_replicas"]) if limits else None,
    )


def _ask_for(replicas: int, name: str) -> None:
    """Without a new deployment of the application, so those that stay are not touched."""
    from ray.serve._private.common import DeploymentID

    id_ = DeploymentID(name=name, app_name=APPLICATION)
    _controller("update_deployment_replicas", id_, replicas)


def _controller(method: str, *args: Any) -> Any:
    """The answer of Serve's controller; its actor is what Serve's own tools ask."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    actor = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    return ray.get(getattr(actor, method).remote(*args))
