"""The requests and the scheduled steps of a modelled engine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import RetentionHint
from kvroute.replay.workload.trace import Request
from kvroute.replica.modelled.modelled_scheduler import ModelledSequence
from kvroute.replica.modelled.table_pool import SequenceTable, TablePool


@dataclass(eq=False)
class ReplayTable(SequenceTable):
    """The blocks of a request."""

    tokens: int  # number of tokens of prompt and answer at the latest decision about the request
    hashes: list[Fingerprint]
    blocks: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def length(self) -> int:
        return self.tokens


@dataclass(eq=False)
class ReplayedRequest(ModelledSequence):
    """A request in a modelled engine."""

    came_s: float  # time of arrival
    due_s: float  # time of arrival, plus the order from the router
    number: int  # number of the arrival
    request: Request
    keep: RetentionHint
    table: ReplayTable
    is_in_batch_class: bool = False
    computed: int = 0
    since: int = 0
    is_in_lane: bool = False
    known: int = 0  # tokens of prompt and answer when it was preempted; 0: it never was
    preempted_s: float = 0.0  # time of the last of these tokens, if the answer had begun

    @property
    def order(self) -> tuple[float, int, int]:
        return self.due_s, self.number, 0

    @property
    def arrived_s(self) -> float:
        return self.came_s

    @property
    def is_batch(self) -> bool:
        return self.is_in_batch_class

    def stopped(self, steps: int) -> None:
        self.table.tokens += steps


class ReplayPool(TablePool):
    """The KV cache of a modelled engine, and its changes since the caller has taken them.

    Blocks of answers have the fingerprints -1, -2 and so on, which no prompt has. Routers do not
    learn of them.
    """

    def __init__(self, capacity_blocks: int, block_size: int) -> None:
        super().__init__(capacity_blocks, block_size)
        self._added: dict[Fingerprint, None] = {}  # an ordered set
        self._removed: list[Fingerprint] = []
        self._answers = 0  # number of fingerprints of answers

    def evicted(self, hash_: Fingerprint) -> None:
        if hash_ < 0 or hash_ in self.cache:
            return
        if hash_ in self._added:
            del self._added[hash_]
        else:
            self._removed.append(hash_)

    def stored(self, hashes: Sequence[Fingerprint]) -> None:
        self._added |= {hash_: None for hash_ in hashes if hash_ > 0 and hash_ not in self.cache}

    def complete(self, table: SequenceTable, full_blocks: int) -> None:
        for _ in range(len(table.hashes), full_blocks):
            self._answers += 1
            table.hashes.append(Fingerprint(-self._answers))

    def take_changes(self) -> tuple[list[Fingerprint], list[Fingerprint]]:
        """Return the blocks that were added and removed since the last call."""
        added, removed = [*self._added], self._removed
        self._added, self._removed = {}, []
        return added, removed


@dataclass(slots=True)
class StepResult:
    """What routers learn at the end of the planned steps."""

    first_tokens: list[Request] = field(default_factory=list)  # requests with their first token
    finished: list[Request] = field(default_factory=list)
    added: list[Fingerprint] = field(default_factory=list)  # newly cached blocks
    removed: list[Fingerprint] = field(default_factory=list)  # evicted blocks; apply before `added`


def blocks_needed(request: Request) -> int:
    """Return the number of KV blocks for a request's prompt and whole answer."""
    return -(-(request.input_tokens + request.output_tokens) // request.block_tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """The scheduled steps: one step with prefill, or several steps with decodes only."""

    started_s: float
    steps: int
    first_s: float  # duration of the first step
    growth_s: float  # how much longer each step is than the step before
    chunks: Mapping[ReplayedRequest, int]  # request -> its tokens that a step computes

    @property
    def ends_s(self) -> float:
        """Return the time at which the last step ends."""
        k = self.steps
        return self.started_s + k * self.first_s + self.growth_s * k * (k - 1) / 2

    def steps_by(self, now_s: float) -> int:
        """Return the number of steps that have started by that time; it is at least 1."""
        past_s = now_s - self.started_s
        linear_s = self.first_s - self.growth_s / 2
        # k steps take growth/2 k^2 + linear k seconds. This solves for k if they take `past_s`, in
        # the form of the root that also allows growth = 0.
        root = 2 * past_s / (linear_s + math.sqrt(linear_s**2 + 2 * self.growth_s * past_s))
        return min(self.steps, max(1, math.ceil(root)))
