"""Writes a JSON line for each request with its lengths, placement and outcome.

`kvroute replay` reads the lines. They contain lengths, times and block ids, but no text and no
token ids. The log cannot delay or fail a request: a separate task writes the lines, and drops them
if the disk is too slow.
"""

import asyncio
import errno
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import HOST
from kvroute.contract.priority import Priority
from kvroute.router.placement.attempts import Attempt, Placement, RequestObserver
from kvroute.router.placement.ledger import Ledger
from kvroute.router.sessions.breaks import Break

log = logging.getLogger("kvroute.request_log")

ID_TOKENS = 128  # least tokens for one id, since an id for each engine block would make long lines
ID_BITS = (1 << 53) - 1  # mask of the bits of a fingerprint that every JSON reader keeps exactly
WRITE_S = 0.5  # time between two writes
WAITING_LINES = 10_000  # lines that may wait for the disk; further ones are dropped


class Line(msgspec.Struct):
    """One request at one replica, in an extension of Mooncake's format.

    The first four fields are Mooncake's. `kvroute replay` reads them in workload/trace.py.
    """

    timestamp: float  # arrival, in milliseconds since 1970
    input_length: int
    output_length: int  # output tokens of all choices together
    hash_ids: Sequence[int]  # an id for each `block_size` tokens that a cache could hold
    block_size: int
    model: str
    replica: str
    reusable_tokens: int  # longest cached prefix at any replica, as far as the router knew
    expected_tokens: int  # cached prefix at this replica, as far as the router knew
    cached_tokens: int | None  # cached prefix that the engine reported; None without a first token
    predicted_ttft_s: float
    ttft_s: float | None  # None without a first token
    duration_s: float
    outcome: str  # ok | cancelled | refused | failed (the replica was lost; perhaps sent again)
    ledger: Ledger | None  # prompt tokens by cause; None without a first token
    request_id: str  # x-request-id of the response
    lora: str | msgspec.UnsetType = msgspec.UNSET  # requested adapter
    tenant: str | msgspec.UnsetType = msgspec.UNSET  # owner of the API key, if keys are needed
    broken: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET  # changed place, as in receipts
    host_tokens: int | msgspec.UnsetType = msgspec.UNSET  # cached tokens reloaded from host memory
    evicted_why: str | msgspec.UnsetType = msgspec.UNSET  # reason for the ledger's evicted tokens
    queued_s: float | msgspec.UnsetType = msgspec.UNSET  # wait before it was sent, if any
    seat_s: float | msgspec.UnsetType = msgspec.UNSET  # part of queued_s spent waiting for a seat
    priority: str | msgspec.UnsetType = msgspec.UNSET  # priority, if it is not `default`
    session: int | msgspec.UnsetType = msgspec.UNSET  # hash of the client's session id
    session_end: bool | msgspec.UnsetType = msgspec.UNSET  # True for a session's last request
    tools: bool | msgspec.UnsetType = msgspec.UNSET  # True if the model might call tools


class RequestLog(RequestObserver):
    """Writes one router's lines of one model to a file."""

    def __init__(self, file: Path, *, model: str, block_size: int) -> None:
        self.dropped = 0  # lines that were not written
        self._file = file
        self._model = model
        self._blocks_per_id = -(-ID_TOKENS // block_size)
        self._block_size = block_size
        self._lines: list[Line] = []

    def ended(self, attempt: Attempt) -> None:
        """Add a line for an ended request, unless it moved to another replica."""
        if attempt.placement is None or attempt.outcome == "moved":
            return
        if len(self._lines) >= WAITING_LINES:
            self._drop(1, "the disk is slow")
            return
        self._lines.append(self._line(attempt, attempt.placement))

    async def run(self) -> None:
        """Write the waiting lines every WRITE_S until cancelled."""
        while True:
            await asyncio.sleep(WRITE_S)
            await self.flush()

    async def flush(self) -> None:
        """Write the waiting lines, or drop them if that fails."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            await asyncio.to_thread(_append, self._file, lines)
        except OSError as error:
            self._drop(len(lines), str(error))

    def _line(self, attempt: Attempt, placement: Placement) -> Line:
        duration_s = time.monotonic() - attempt.sent_s
        waited_s = attempt.context.wait.waited_s
        ledger = attempt.ledger()
        return Line(
            timestamp=round(1000 * (time.time() - duration_s - waited_s), 3),
            input_length=placement.prompt_tokens,
            output_length=attempt.output_tokens,
            hash_ids=self._ids(placement.chain),
            block_size=self._blocks_per_id * self._block_size,
            model=self._model,
            replica=attempt.replica_id,
            reusable_tokens=placement.reusable_tokens,
            expected_tokens=placement.expected_tokens(attempt.replica_id),
            cached_tokens=attempt.cached_tokens,
            predicted_ttft_s=placement.predicted_ttft_s(attempt.replica_id),
            ttft_s=None
            if attempt.first_token_s is None
            else attempt.first_token_s - attempt.sent_s,
            duration_s=duration_s,
            outcome=attempt.outcome or "ok",
            ledger=ledger,
            request_id=attempt.context.request_id,
            lora=placement.lora or msgspec.UNSET,
            tenant=attempt.context.tenant or msgspec.UNSET,
            broken=_broken(attempt.context.broken, placement) or msgspec.UNSET,
            host_tokens=attempt.reloaded_tokens.get(HOST, msgspec.UNSET),
            evicted_why=attempt.evicted_why if ledger and ledger.evicted else msgspec.UNSET,
            queued_s=waited_s or msgspec.UNSET,
            seat_s=attempt.context.wait.seat_s or msgspec.UNSET,
            priority=_unless_default(attempt.context.urgency.priority),
            session=attempt.context.hints.session & ID_BITS or msgspec.UNSET,
            session_end=attempt.context.hints.is_end or msgspec.UNSET,
            tools=attempt.context.hints.has_tools or msgspec.UNSET,
        )

    def _ids(self, chain: Sequence[Fingerprint]) -> list[int]:
        step = self._blocks_per_id
        return [fingerprint & ID_BITS for fingerprint in chain[step - 1 :: step]]

    def _drop(self, lines: int, reason: str) -> None:
        if not self.dropped:
            log.warning("requests are missing in the log %s: %s", self._file, reason)
        self.dropped += lines


def _broken(broken: Break | None, placement: Placement) -> dict[str, Any] | None:
    return broken.as_json(known_tokens=placement.known_tokens) if broken else None


def _unless_default(priority: Priority) -> str | msgspec.UnsetType:
    return msgspec.UNSET if priority == "default" else priority


def _append(file: Path, lines: Sequence[Line]) -> None:
    """Append all lines or none, since a partial line would corrupt the log."""
    text = msgspec.json.Encoder().encode_lines(lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as log:
        size = os.fstat(log.fileno()).st_size
        if log.write(text) < len(text):
            log.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
