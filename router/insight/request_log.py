"""What one router was asked and what came of it, a JSON line for each request.

`kvroute replay` reads it. Lengths, times and block ids only: no text and no token ids. Nothing
here can delay or fail a request: a task of its own writes the lines, and drops them when the disk
cannot follow.
"""

import asyncio
import errno
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from replica.kvindex.fingerprint import Fingerprint
from router.routing.ledger import Ledger
from router.routing.trips import Placement, Trip, Witness

log = logging.getLogger("kvroute.request_log")

ID_TOKENS = 128  # that one id stands for, at least: the engines' blocks would make long lines
ID_BITS = (1 << 53) - 1  # of a fingerprint: what every reader of JSON keeps of a number
WRITE_S = 0.5  # between writes
WAITING_LINES = 10_000  # not yet written; more are dropped


class Line(msgspec.Struct):
    """One request at one replica. The first four are Mooncake's; `router.replay.trace` reads it."""

    timestamp: float  # ms since 1970, when it was sent
    input_length: int
    output_length: int  # of all its choices together
    hash_ids: Sequence[int]  # one for each `block_size` tokens that a cache could have had
    block_size: int
    model: str
    replica: str
    reusable_tokens: int  # cached anywhere, as far as the router knew
    expected_tokens: int  # cached there, as far as the router knew
    cached_tokens: int | None  # and as the engine found; None, like ttft_s: there was no token
    predicted_ttft_s: float
    ttft_s: float | None
    duration_s: float
    outcome: str  # ok | cancelled | refused | failed: lost with its replica, perhaps sent again
    ledger: Ledger | None  # where the prompt's tokens came from; None as well without a token
    request_id: str  # the answer's x-request-id
    lora: str | msgspec.UnsetType = msgspec.UNSET  # the adapter that was asked for


class RequestLog(Witness):
    """The lines of one router about one model, in one file."""

    def __init__(self, file: Path, *, model: str, block_size: int) -> None:
        self.dropped = 0
        self._file = file
        self._model = model
        self._blocks_per_id = -(-ID_TOKENS // block_size)
        self._block_size = block_size
        self._lines: list[Line] = []

    def ended(self, trip: Trip) -> None:
        """Notes a request that is over, unless it never was where the trip went."""
        if trip.placement is None or trip.outcome == "moved":
            return
        if len(self._lines) >= WAITING_LINES:
            self._drop(1, "the disk is slow")
            return
        self._lines.append(self._line(trip, trip.placement))

    async def run(self) -> None:
        """Writes what was noted, until cancelled."""
        while True:
            await asyncio.sleep(WRITE_S)
            await self.flush()

    async def flush(self) -> None:
        """Writes what was noted since the last time, or drops it."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            await asyncio.to_thread(_append, self._file, lines)
        except OSError as error:
            self._drop(len(lines), str(error))

    def _line(self, trip: Trip, placement: Placement) -> Line:
        duration_s = time.monotonic() - trip.sent_s
        return Line(
            timestamp=round(1000 * (time.time() - duration_s), 3),
            input_length=placement.prompt_tokens,
            output_length=trip.output_tokens,
            hash_ids=self._ids(placement.chain),
            block_size=self._blocks_per_id * self._block_size,
            model=self._model,
            replica=trip.replica_id,
            reusable_tokens=placement.reusable_tokens,
            expected_tokens=placement.expected_tokens(trip.replica_id),
            cached_tokens=trip.cached_tokens,
            predicted_ttft_s=placement.predicted_ttft_s(trip.replica_id),
            ttft_s=None if trip.first_token_s is None else trip.first_token_s - trip.sent_s,
            duration_s=duration_s,
            outcome=trip.outcome or "ok",
            ledger=trip.ledger(),
            request_id=trip.asked.request_id,
            lora=placement.lora or msgspec.UNSET,
        )

    def _ids(self, chain: Sequence[Fingerprint]) -> list[int]:
        step = self._blocks_per_id
        return [fingerprint & ID_BITS for fingerprint in chain[step - 1 :: step]]

    def _drop(self, lines: int, why: str) -> None:
        if not self.dropped:
            log.warning("requests are missing in the log %s: %s", self._file, why)
        self.dropped += lines


def _append(file: Path, lines: Sequence[Line]) -> None:
    """All of them or none: half a line would spoil the log."""
    text = msgspec.json.Encoder().encode_lines(lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as log:
        size = os.fstat(log.fileno()).st_size
        if log.write(text) < len(text):
            log.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
