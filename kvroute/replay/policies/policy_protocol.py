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
from kvroute.replica.fabric.pull import LinkSpeed, Pull, PullResult


@dataclass(frozen=True, slots=True)
class Setup:
    """What a router knows about its replicas at the start."""

    replicas: int  # number of replicas
    kv_tokens: int  # size of each replica's KV cache, in tokens
    prefill: PrefillModel
    block_tokens: int  # tokens of one block
    chunk_tokens: int = 8192  # maximum tokens in an engine step: vLLM's max_num_batched_tokens
    max_sequences: int = 0  # maximum sequences in an engine step; 0: unknown
    tiers: Mapping[Tier, TierFacts] = field(default_factory=dict)  # slower tiers of each replica
    link: LinkSpeed | None = None  # the replicas' links for pulls; None: there are no pulls

    @property
    def capacity_blocks(self) -> int:
        return self.kv_tokens // self.block_tokens


class PolicyDecision(NamedTuple):
    """A policy's decision to send a request to a replica."""

    request: Request
    replica: int
    # Seconds added to the time at which the replica gets the request. The replica admits requests
    # in the order of the sum.
    order_s: float = 0.0
    new_tokens: int | None = None  # prompt tokens to compute, as the router expects
    keep: RetentionHint | None = None  # retention hint for the request's blocks
    is_batch: bool = False  # whether the request gives way to others in the replica
    pull: Pull | None = None  # blocks to pull from another replica; None: nothing


class LoadReport(NamedTuple):
    """A replica's report of its load."""

    load: Load
    pending_tokens: int  # uncached prompt tokens of the requests without a first token


class Policy(Protocol):
    """A routing policy in one router: its decisions, and the events that it learns from."""

    # Seconds between two reports of each replica; infinite: the policy uses no reports.
    report_s: float
    report_age_s: float  # age of a report in seconds when it reaches the router

    def on_arrival(self, request: Request, now_s: float) -> None:
        """Accept a client's request. It waits in the router until `take_decisions` returns it."""

    def take_decisions(self, now_s: float) -> Iterable[PolicyDecision]:
        """Return the requests that go to replicas now, in their order."""

    def wake_after_s(self) -> float | None:
        """Return the seconds until the next call of `take_decisions`; None: at the next event."""

    def on_pulled(self, request: Request, result: PullResult, now_s: float) -> None:
        """Record what a request's pull has done. The replica reports it with the first token."""

    def on_first_token(self, request: Request, now_s: float) -> None:
        """Record a request's first token."""

    def on_finish(self, request: Request, now_s: float) -> None:
        """Record the end of a request's answer."""

    def on_index_change(
        self, replica: int, added: Sequence[Fingerprint], removed: Sequence[Fingerprint]
    ) -> None:
        """Record that a replica has cached or evicted blocks."""

    def on_reports(self, reports: Sequence[LoadReport], now_s: float) -> None:
        """Receive the reports of all replicas, in the order of the replicas.

        A single router gets no reports, since it knows all requests.
        """

    def take_message(self, now_s: float) -> RouterMessage | None:
        """Return a message for the other routers with the events since the last call, or None."""

    def receive(self, message: RouterMessage, now_s: float) -> None:
        """Receive a message from another router."""
