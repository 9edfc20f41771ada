"""The events of a simulation (simulate.py)."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.messages import RouterMessage
from kvroute.replay.policies.policy_protocol import LoadReport
from kvroute.replay.workload.trace import Request


@dataclass(frozen=True, slots=True)
class Arrival:
    """A client sends a request to a router."""

    request: Request


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The end of the steps that a replica has planned."""

    replica: int
    at_s: float  # planned end; the event is ignored if the replica has changed its plan since


@dataclass(frozen=True, slots=True)
class ReloadEnd:
    """A replica's oldest copy from a slower tier ends."""

    replica: int


@dataclass(frozen=True, slots=True)
class PullChange:
    """A pull ends, or its first bytes arrive."""

    at_s: float  # the event is ignored if the pulls have changed since


@dataclass(frozen=True, slots=True)
class IndexChange:
    """Routers receive a change of a replica's cached blocks."""

    replica: int
    added: Sequence[Fingerprint]
    removed: Sequence[Fingerprint]


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """The other routers receive a router's message."""

    router: int  # the sender
    message: RouterMessage


@dataclass(frozen=True, slots=True)
class RouterWake:
    """A router may be able to send requests from its queue at this time."""

    router: int


@dataclass(frozen=True, slots=True)
class Poll:
    """All replicas send a report of their load to a router."""

    router: int


@dataclass(frozen=True, slots=True)
class Reports:
    """A router receives the reports of all replicas."""

    router: int
    reports: Sequence[LoadReport]  # in the order of the replicas


Event = (
    Arrival
    | StepEnd
    | ReloadEnd
    | PullChange
    | IndexChange
    | PeerMessage
    | RouterWake
    | Poll
    | Reports
)
