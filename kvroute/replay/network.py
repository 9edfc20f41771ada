"""A model of the network over which replicas pull blocks from each other's host memory.

Each replica has one link in each direction. Pulls that use a link at the same time share its
bandwidth. The caller runs the clock.
"""

import math
from collections import Counter
from dataclasses import dataclass

from kvroute.replay.workload.trace import Request
from kvroute.replica.fabric.pull import LinkSpeed, Pull, PullResult, Reason

ROUNDING = 1.0  # so few bytes are left of a complete pull, because of rounding errors


@dataclass(slots=True, eq=False)
class PullInProgress:
    """A pull in progress."""

    request: Request
    source: int
    target: int
    first_block: int  # the blocks before it are not pulled
    blocks: int
    block_bytes: int
    begun_s: float
    flows_s: float  # time of its first bytes
    late_s: float  # time at which it ends in any case
    left_bytes: float

    @property
    def arrived(self) -> int:
        """Return the number of blocks that have arrived."""
        return self.blocks - math.ceil(max(0.0, self.left_bytes - ROUNDING) / self.block_bytes)

    def result(self, tokens: int, now_s: float, reason: Reason) -> PullResult:
        """Return what the pull has done.

        Args:
            tokens: the pulled tokens that the target can use.
            now_s: the current time.
            reason: why they are not all.
        """
        size = tokens // self.request.block_tokens * self.block_bytes
        return PullResult(tokens, size, now_s - self.begun_s, reason)


class Network:
    """The pulls in progress between all replicas."""

    def __init__(self, model: LinkSpeed) -> None:
        """Create a network in which each replica's link has this speed in each direction."""
        self.busy_s = 0.0  # sum over all pulls of the seconds that they took
        self._model = model
        self._transfers: list[PullInProgress] = []
        self._now_s = 0.0

    def begin(
        self,
        request: Request,
        order: Pull,
        target: int,
        *,
        first_block: int,
        blocks: int,
        block_bytes: int,
        now_s: float,
    ) -> None:
        """Begin a pull.

        Args:
            request: the request with the prompt.
            order: the router's order.
            target: the replica that pulls.
            first_block: the number of blocks that the target has already.
            blocks: the number of blocks to pull after them; at least 1.
            block_bytes: bytes of a block.
            now_s: the current time.
        """
        self._advance(now_s)
        flows_s = now_s + self._model.latency_s
        size = float(blocks * block_bytes)
        late_s = now_s + order.within_s
        self._transfers.append(
            PullInProgress(
                request, int(order.replica_id), target, first_block, blocks, block_bytes, now_s,
                flows_s, late_s, size,
            )
        )  # fmt: skip

    @property
    def next_s(self) -> float:
        """Return the next time at which something changes; infinite: no pull is in progress."""
        times_s = [math.inf]
        for transfer, rate in self._rates():
            ends_s = self._now_s + transfer.left_bytes / rate if rate else transfer.flows_s
            times_s.append(min(ends_s, transfer.late_s))
        return min(times_s)

    def end(self, now_s: float) -> list[PullInProgress]:
        """Remove and return the pulls that are complete or late."""
        self._advance(now_s)
        ended = [
            transfer
            for transfer in self._transfers
            if transfer.late_s <= now_s or transfer.left_bytes <= ROUNDING
        ]
        for transfer in ended:
            self._transfers.remove(transfer)
            self.busy_s += now_s - transfer.begun_s
        return ended

    def _rates(self) -> list[tuple[PullInProgress, float]]:
        """Return the current bytes per second of each pull."""
        flowing = [each for each in self._transfers if each.flows_s <= self._now_s]
        out = Counter(transfer.source for transfer in flowing)
        into = Counter(transfer.target for transfer in flowing)
        rates = []
        for transfer in self._transfers:
            sharing = max(out[transfer.source], into[transfer.target])
            is_flowing = transfer.flows_s <= self._now_s
            rates.append((transfer, self._model.bytes_per_s / sharing if is_flowing else 0.0))
        return rates

    def _advance(self, now_s: float) -> None:
        for transfer, rate in self._rates():
            transfer.left_bytes -= rate * (now_s - self._now_s)
        self._now_s = now_s
