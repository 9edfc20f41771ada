"""`kvroute scale` changes the number of replicas of a running cluster without losing requests."""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from kvroute.deployments import APPLICATION, deployment, last_line
from kvroute.local.progress import Progress

POLL_S = 0.2


class ScaleError(RuntimeError):
    """The number of replicas is not possible; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """The state of the replicas in Serve's controller."""

    wanted: int
    states: Mapping[str, int]  # STARTING, RUNNING, STOPPING and the like -> replicas
    message: str  # why the actual state differs from the wanted one, if Serve knows
    each: Mapping[str, float]  # Ray's resources for one replica: CPU, GPU -> amount
    bounds: tuple[int, int] | None = None  # least and most, with autoscaling


def scale(replicas: int, model: str | None, ray_address: str, progress: Progress) -> None:
    """Returns when `replicas` are ready and removed ones have finished their requests.

    model: None if there is only one. Raises ScaleError when there are too few resources, when
    another user requests a different number meanwhile, and with autoscaling.
    """
    with _connected(ray_address):
        import ray

        from kvroute.process.ray_internals import set_replicas

        name = deployment(model)
        deployed = _deployed(name)
        refuse_own_size(deployed)
        refuse_no_room(replicas, deployed, ray.available_resources())
        set_replicas(APPLICATION, name, replicas)
        _wait(replicas, name, progress)


def refuse_own_size(deployed: Deployed) -> None:
    """Raises ScaleError with autoscaling, which would undo the change."""
    if deployed.bounds:
        least, most = deployed.bounds
        raise ScaleError(
            f"the fleet finds its own size, now {deployed.wanted}, between {least} and {most} "
            "replicas; serve it with another --replicas or --max-replicas, or without the latter"
        )


def refuse_no_room(replicas: int, deployed: Deployed, free: Mapping[str, float]) -> None:
    """Raises ScaleError when Ray has too few resources for so many."""
    there = sum(deployed.states.values())  # a stopping replica makes room for another
    for name, amount in deployed.each.items():
        room = there + int(free.get(name, 0.0) // amount) if amount else replicas
        if replicas > room:
            raise ScaleError(
                f"{replicas} replicas of {amount:g} {name} are too many: {there} are there, and "
                f"{free.get(name, 0.0):g} {name} is free; {room} is the most, until a machine joins"
            )


def describe(deployed: Deployed) -> str:
    """The fleet's state in words."""
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
    """Connects this process to the cluster as a Ray driver."""
    import ray

    from kvroute.process.ray_internals import use_auth_token

    logging.getLogger("ray").setLevel(logging.ERROR)
    use_auth_token()
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
    from kvroute.process.ray_internals import deployment_details

    found = deployment_details(APPLICATION, name)
    limits = found["deployment_config"].get("autoscaling_config")
    return Deployed(
        wanted=found["target_num_replicas"],
        states=Counter(str(replica["state"].value) for replica in found["replicas"]),
        message=found["message"],
        each=found["required_resources"],
        bounds=(limits["min_replicas"], limits["max_replicas"]) if limits else None,
    )
