"""What a replay asks of a routing policy, and what a policy is told."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import Tier
from kvroute.contract.keep import Keep
from kvroute.contract.messages import Message
from kvroute.contract.records import Load, TierFacts
from kvroute.prefill.speed import PrefillModel
from kvroute.replay.workload.trace import Request


@dataclass(frozen=True, slots=True)
class Setup:
    """A router's initial facts about its replicas."""

    replicas: int
    kv_tokens: int
    prefill: PrefillModel
    block_tokens: int
    chunk_tokens: int = 8192  # of one step of an engine: vLLM's max_num_batched_tokens
    tiers: Mapping[Tier, TierFacts] = field(default_factory=dict)  # slower tiers of each replica

    @property
    def capacity_blocks(self) -> int:
        return self.kv_tokens // self.block_tokens


class Sending(NamedTuple):
    """A request that goes to a replica. order_s: its turn there, after its arrival. new_tokens: to
    compute there, as the router expects. keep: how long its blocks stay cached there."""

    request: Request
    replica: int
    order_s: float = 0.0
    new_tokens: int | None = None
    keep: Keep | None = None


class Report(NamedTuple):
    """What a replica says of itself."""

    load: Load
    pending_tokens: int  # uncached prompt tokens of the requests without a first token


class Policy(Protocol):
    """One router's decisions, and the events from which it learns."""

    report_s: float  # between two reports of the replicas; infinite: it reads none
    report_age_s: float  # of a report when the router has it

    def arrived(self, request: Request, now_s: float) -> None:
        """A client's request. It waits in the router until `sends` has it."""

    def sends(self, now_s: float) -> Iterable[Sending]:
        """The requests that go to replicas now, in this order."""

    def wakes_s(self) -> float | None:
        """When it wants to be asked again, should nothing happen before. None: never."""

    def first_token(self, request: Request, now_s: float) -> None: ...

    def finished(self, request: Request, now_s: float) -> None: ...

    def index_changed(
        self, replica: int, added: Sequence[Fingerprint], removed: Sequence[Fingerprint]
    ) -> None: ...

    def reported(self, reports: Sequence[Report], now_s: float) -> None:
        """What every replica said of itself, in the replicas' order. Without other routers there
        are no reports, since a router then knows all that is sent."""

    def take_message(self, now_s: float) -> Message | None:
        """Its events for the other routers since the last call."""

    def receive(self, message: Message, now_s: float) -> None:
        """A message of another router, after its delay."""
