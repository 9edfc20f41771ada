"""What Ray Serve's controller says of a model's replicas: how many it wants, and their states."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from kvroute.process import ray_internals

FRESH_S = 0.5  # an answer of the controller up to this age is used again
WAIT_S = 1.0  # longest wait for an answer; a controller that is slow or hangs delays nobody longer


@dataclass(frozen=True, slots=True)
class Deployed:
    """A model's replicas, as Ray Serve's controller lists them."""

    wanted: int  # number of replicas that Serve tries to reach
    states: Mapping[str, str]  # replica id -> state in Serve, such as "STARTING" or "RUNNING"
    ended: frozenset[str]  # ids of replicas that have ended lately


class DeployedReplicas:
    """Asks Ray Serve's controller, when somebody wants to know, and only once at a time.

    Args:
        read: asks the controller; runs in a thread.
    """

    def __init__(self, read: Callable[[], Deployed]) -> None:
        self._read = read
        self._last: Deployed | None = None
        self._asked_s = self._answered_s = -FRESH_S  # times of the last question and answer
        self._asking: asyncio.Task[None] | None = None

    async def get(self) -> Deployed | None:
        """Return the controller's answer, or its last one if it is slow; None if it is away."""
        if self._asking is None and time.monotonic() - self._answered_s > FRESH_S:
            self._asked_s = time.monotonic()
            # The task ends when the controller answers, or when Ray gives up.
            self._asking = asyncio.create_task(self._ask(), name="ask Serve's controller")
        if self._asking:
            left_s = self._asked_s + WAIT_S - time.monotonic()
            await asyncio.wait([self._asking], timeout=max(0.0, left_s))
        return self._last

    async def _ask(self) -> None:
        try:
            self._last = await asyncio.to_thread(self._read)
        except (RayError, RayServeException, ValueError, KeyError):  # no controller, for example
            self._last = None
        finally:
            self._answered_s, self._asking = time.monotonic(), None


def read_deployed(deployments: Sequence[str]) -> Deployed:
    """Ask the controller for the replicas of these deployments of this process's application."""
    details = ray_internals.deployments(serve.get_replica_context().app_name)
    return deployed([details[name] for name in deployments])


def deployed(details: Sequence[Mapping[str, Any]]) -> Deployed:
    """Return the replicas of several deployments from the details that Serve reports of each."""
    replicas = [replica for each in details for replica in each["replicas"]]
    ended = [replica for each in details for replica in each.get("recent_dead_replicas", ())]
    return Deployed(
        sum(each["target_num_replicas"] for each in details),
        {str(replica["replica_id"]): str(replica["state"].value) for replica in replicas},
        frozenset(str(replica["replica_id"]) for replica in ended),
    )
