"""Moves the replicas of a machine that goes away to other machines, for `kvroute drain`."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from kvroute.controller.ray_connection import connected
from kvroute.deployments import APPLICATION, kind_of
from kvroute.local.progress import StartProgress
from kvroute.wording import plural

POLL_S = 0.5  # seconds between two queries of the processes on the machine


class DrainError(RuntimeError):
    """The machine cannot be emptied. The message says why and what to do."""


def drain(within_s: float, progress: StartProgress) -> None:
    """Let Ray empty this machine, and wait until it has no replica or router any more.

    Args:
        within_s: Seconds after which the machine may end.
        progress: Prints which processes are left.

    Raises:
        DrainError: This is the head or the only machine, Ray refuses, or the time is over.
    """
    with connected("auto"):
        import ray

        from kvroute.process.ray_internals import drain_node

        node_id = ray.get_runtime_context().get_node_id()
        check_can_drain(node_id, ray.nodes())
        if problem := drain_node(node_id, within_s):
            raise DrainError(f"Ray refuses to empty this machine: {problem}")
        progress.step("Ray starts no more processes here")
        _wait(node_id, within_s, progress)


def check_can_drain(node_id: str, nodes: Sequence[dict[str, Any]]) -> None:
    """Raise DrainError if the machine is the head, or no other one can take its replicas.

    Args:
        node_id: The machine's id in Ray.
        nodes: Ray's description of all machines.
    """
    alive = [node for node in nodes if node["Alive"]]
    if len(alive) < 2:
        raise DrainError(
            "this is the cluster's only machine; to stop the cluster, end kvroute serve"
        )
    for node in alive:
        if node["NodeID"] == node_id and "node:__internal_head__" in node["Resources"]:
            raise DrainError("this is the cluster's head, without which the cluster ends")


def describe(processes: Sequence[str]) -> str:
    """Return a line for the terminal about the processes that are left.

    Args:
        processes: The kind of each process, such as "replica".
    """
    counts = Counter(processes)
    left = " and ".join(plural(number, kind) for kind, number in sorted(counts.items()))
    return f"{left} left" if left else "no replica and no router is left"


def _wait(node_id: str, within_s: float, progress: StartProgress) -> None:
    """Wait until the machine has no process of kvroute. Its Ray ends when nothing runs there."""
    import ray

    ends_s, shown = time.monotonic() + within_s, ""
    while True:
        try:
            left = [*_processes_on(node_id)]
        except (ray.exceptions.RayError, ConnectionError):
            progress.step("Ray has ended on this machine")
            return
        if (line := describe(left)) != shown:
            progress.step(line)
            shown = line
        if not left:
            return
        if time.monotonic() >= ends_s:
            raise DrainError(
                f"{line} after {within_s:g} s; when this machine ends, requests that still run "
                "here continue on other replicas"
            )
        time.sleep(POLL_S)


def _processes_on(node_id: str) -> Iterator[str]:
    """Yield the kind of each of kvroute's processes on a machine."""
    from kvroute.process.ray_internals import deployments

    for name, details in deployments(APPLICATION).items():
        for replica in details["replicas"]:
            if replica.get("node_id") == node_id:  # one that has no machine yet has no id
                yield kind_of(name)
