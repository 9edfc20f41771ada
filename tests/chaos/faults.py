"""What may happen to a cluster, each from the beginning of a block to its end."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.chaos.client_faults import CLIENT_FAULTS
from tests.chaos.redis_faults import REDIS_FAULTS
from tests.chaos.victim import Fault, Victim
from tests.support.own_disk import CAN_MOUNT, full_disk


def sent(number: signal.Signals, title: str) -> Fault:
    """One process of that title gets a signal."""

    @asynccontextmanager
    async def fault(victim: Victim) -> AsyncIterator[None]:
        process = victim.any_of(title)
        process.send_signal(number)
        yield

    return fault


@asynccontextmanager
async def disk_full(victim: Victim) -> AsyncIterator[None]:
    """The one of logs and request logs, which is the cluster's own."""
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
BREAKING = (  # connections of clients
    "HAProxy is killed",
    "Serve's process beside HAProxy is killed",
    "a router is killed",
)
