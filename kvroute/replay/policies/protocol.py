"""The interface between a replay and a routing policy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import Tier
from kvroute.contract.keep import RetentionHint
from kvroute.contract.messages import RouterMessage
from kvroute.contract.records import Load, TierFacts
from kvroute.prefill.speed import PrefillModel
from kvroute.replay.workload.trace import Request


@dataclass(frozen=True, slots=True)
class Setup:
    """What a router knows of its replicas at the start."""

    replicas: int
    kv_tokens: int
    prefill: PrefillModel
    block_tokens: int
    chunk_tokens: int = 8192  # largest number of tokens in an engine step: max_num_batched_tokens
    tiers: Mapping[Tier, TierFacts] = field(default_factory=dict)  # slower tiers of each replica

    @property
    def capacity_blocks(self) -> int:
        return self.kv_tokens // self.block_tokens


class Sending(NamedTuple):
    """A request that goes to a replica."""

    request: Request
    replica: int
    order_s: float = 0.0  # added to its arrival for its place in the replica's queue
    new_tokens: int | None = None  # prompt tokens to compute, as the router expects
    keep: RetentionHint | None = None  # retention hint for its blocks


class LoadReport(NamedTuple):
    """A replica's report of its load."""

    load: Load
    pending_tokens: int  # uncached prompt tokens of the requests without a first token


class Policy(Protocol):
    """One router's decisions, and the events from which it learns."""

    report_s: float  # seconds between two reports of the replicas; infinite: it reads none
    report_age_s: float  # age of a report when it reaches the router

    def arrived(self, request: Request, now_s: float) -> None:
        """Accept a client's request. It waits in the router until `sends` returns it."""

    def sends(self, now_s: float) -> Iterable[Sending]:
        """Return the requests that go to replicas now, in this order."""

    def wakes_s(self) -> float | None:
        """Return the seconds until `sends` should be called if no event happens; None: never."""

    def first_token(self, request: Request, now_s: float) -> None: ...

    def finished(self, request: Request, now_s: float) -> None: ...

    def index_changed(
        self, replica: int, added: Sequence[Fingerprint], removed: Sequence[Fingerprint]
    ) -> None: ...

    def reported(self, reports: Sequence[LoadReport], now_s: float) -> None:
        """Receive every replica's report, in the replicas' order.

        A single router gets no reports, since it knows of all requests.
        """

    def take_message(self, now_s: float) -> RouterMessage | None:
        """Return its events for the other routers since the last call."""

    def receive(self, message: RouterMessage, now_s: float) -> None:
        """Receive a message of another router, after its delay."""
