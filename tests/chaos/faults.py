"""The faults of a cluster. Each one is a context manager: it lasts as long as the context."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.chaos.client_faults import CLIENT_FAULTS
from tests.chaos.redis_faults import REDIS_FAULTS
from tests.chaos.victim import Fault, Victim
from tests.support.own_disk import CAN_MOUNT, full_disk


def sent(number: signal.Signals, title: str) -> Fault:
    """Return the fault that one process with this title gets a signal."""

    @asynccontextmanager
    async def fault(victim: Victim) -> AsyncIterator[None]:
        process = victim.any_of(title)
        process.send_signal(number)
        yield

    return fault


@asynccontextmanager
async def disk_full(victim: Victim) -> AsyncIterator[None]:
    """Fill the cluster's own disk, on which it writes logs and request logs."""
    with full_disk(victim.wired.cluster):
        yield


FAULTS: dict[str, Fault] = {
    "a replica is killed": sent(signal.SIGKILL, "kvroute:Replica"),
    "a replica is stopped": sent(signal.SIGSTOP, "kvroute:Replica"),
    **REDIS_FAULTS,
    **CLIENT_FAULTS,
    "Serve's controller is killed": sent(signal.SIGKILL, "ServeController"),
    "Serve's proxy is killed": sent(signal.SIGKILL, "ray::ProxyActor"),
    "HAProxy is killed": sent(signal.SIGKILL, "program/haproxy"),
    "Serve's process beside HAProxy is killed": sent(signal.SIGKILL, "ray::HAProxyManager"),
    "a router is killed": sent(signal.SIGKILL, "kvroute:Router"),
}
if CAN_MOUNT:
    FAULTS["the disk is full"] = disk_full
BREAKING = (  # faults that close connections of clients, so that answers break
    "HAProxy is killed",
    "Serve's process beside HAProxy is killed",
    "a router is killed",
)
