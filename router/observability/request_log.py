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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import HOST
from kvroute.blocks.variants import name_of
from kvroute.router.placement.attempts import Attempt, Placement, RequestObserver
from kvroute.router.placement.ledger import Ledger
from kvroute.router.sessions.breaks import Break

log = logging.getLogger("kvroute.request_log")

# An id stands for at least this many tokens: one id for each block would make the lines long.
ID_TOKENS = 128
ID_BITS = (1 << 53) - 1  # mask for fingerprints: all JSON readers represent 53 bits exactly
WRITE_S = 0.5  # seconds between two writes to the file
WAITING_LINES = 10_000  # lines that may wait for the disk; further lines are dropped


class LogLine(msgspec.Struct):
    """One request at one replica, in an extension of Mooncake's format.

    The first four fields are Mooncake's. `kvroute replay` reads them in workload/trace.py.
    """

    timestamp: float  # arrival, in milliseconds since 1970
    input_length: int
    output_length: int  # output tokens of all choices together
    hash_ids: Sequence[int]  # one id for each `block_size` tokens that a cache could hold
    block_size: int  # tokens of an id; a multiple of the engine's block size
    model: str
    replica: str
    reusable_tokens: int  # tokens of the longest hit on any replica, as the router expected
    expected_tokens: int  # tokens of the hit on this replica, as the router expected
    cached_tokens: int | None  # tokens of the hit in the engine; None without a first token
    predicted_ttft_s: float  # the router's prediction for ttft_s
    ttft_s: float | None  # seconds from sending to the first token; None without a first token
    duration_s: float  # seconds from sending to the end
    outcome: str  # ok | cancelled | refused | failed (the replica was lost; perhaps sent again)
    ledger: Ledger | None  # prompt tokens by cause; None without a first token
    request_id: str  # x-request-id of the response
    replicas: int  # number of replicas that served, even if the request waited for some of them
    step_tokens: int  # maximum tokens in a step of the replica's engine
    # Position in a prompt at which a token takes this engine twice as long as the first one.
    attention_tokens: float
    kv_tokens: int | msgspec.UnsetType = msgspec.UNSET  # the replica's KV cache, in tokens
    # The name of the requested variant of the model, such as a LoRA adapter.
    variant: str | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="lora")
    tenant: str | msgspec.UnsetType = msgspec.UNSET  # of the caller, if there are tenants
    broken: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET  # change in the chat's history
    host_tokens: int | msgspec.UnsetType = msgspec.UNSET  # cached tokens reloaded from host memory
    evicted_why: str | msgspec.UnsetType = msgspec.UNSET  # reason for the ledger's evicted tokens
    queued_s: float | msgspec.UnsetType = msgspec.UNSET  # wait before it was sent, if any
    priority: str | msgspec.UnsetType = msgspec.UNSET  # priority, if it is not `default`
    session: int | msgspec.UnsetType = msgspec.UNSET  # hash of the client's session id
    session_end: bool | msgspec.UnsetType = msgspec.UNSET  # True for a session's last request
    tools: bool | msgspec.UnsetType = msgspec.UNSET  # True if the model might call tools


class RequestLog(RequestObserver):
    """Writes one router's lines of one model to a file."""

    def __init__(
        self, file: Path, *, model: str, block_size: int, ranks: Callable[[], int]
    ) -> None:
        """Create a log.

        Args:
            file: where the lines are written.
            model: the name of the model.
            block_size: tokens of a block.
            ranks: returns how many ranks get requests at the moment.
        """
        self.dropped = 0  # lines that were not written
        self._ranks = ranks
        self._file = file
        self._model = model
        self._blocks_per_id = -(-ID_TOKENS // block_size)
        self._block_size = block_size
        self._lines: list[LogLine | dict[str, Any]] = []

    def ended(self, attempt: Attempt) -> None:
        """Add a line for an ended request, unless it moved to another replica.

        A line has REASON_s, a part of `queued_s`, for each feature that the request waited for.
        """
        if attempt.placement is None or attempt.outcome == "moved":
            return
        if len(self._lines) >= WAITING_LINES:
            self._drop(1, "the disk is slow")
            return
        line = self._line(attempt, attempt.placement)
        held_s = attempt.context.wait.held_s
        held = {f"{reason}_s": wait_s for reason, wait_s in held_s.items() if wait_s}
        self._lines.append(msgspec.to_builtins(line) | held if held else line)

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

    def _line(self, attempt: Attempt, placement: Placement) -> LogLine:
        duration_s = time.monotonic() - attempt.sent_s
        waited_s = attempt.context.wait.waited_s
        priority = attempt.context.urgency.priority
        ledger = attempt.ledger()
        return LogLine(
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
            # The ranking of a request that has waited has only those that it was admitted to.
            replicas=max(len(placement.ranking), self._ranks()),
            step_tokens=attempt.load.step_tokens,
            attention_tokens=attempt.load.model.attention_tokens,
            kv_tokens=attempt.load.capacity_tokens or msgspec.UNSET,
            variant=name_of(placement.variant) or msgspec.UNSET,
            tenant=attempt.context.entry.tenant or msgspec.UNSET,
            broken=_broken(attempt.context.broken, placement) or msgspec.UNSET,
            host_tokens=attempt.reloaded_tokens.get(HOST, msgspec.UNSET),
            evicted_why=attempt.context.evicted_why if ledger and ledger.evicted else msgspec.UNSET,
            queued_s=waited_s or msgspec.UNSET,
            priority=msgspec.UNSET if priority == "default" else priority,
            session=attempt.context.hints.session & ID_BITS or msgspec.UNSET,
            session_end=attempt.context.hints.is_end or msgspec.UNSET,
            tools=attempt.context.hints.has_tools or msgspec.UNSET,
        )

    def _ids(self, chain: Sequence[Fingerprint]) -> list[int]:
        step = self._blocks_per_id
        return [fingerprint & ID_BITS for fingerprint in chain[step - 1 :: step]]

    def _drop(self, lines: int, reason: str) -> None:
        if not self.dropped:
            log.warning("the request log %s has no lines for some requests: %s", self._file, reason)
        self.dropped += lines


def _broken(broken: Break | None, placement: Placement) -> dict[str, Any] | None:
    return broken.as_json(known_tokens=placement.known_tokens) if broken else None


def _append(file: Path, lines: Sequence[LogLine | dict[str, Any]]) -> None:
    """Append all lines or none, since a partial line would corrupt the log."""
    text = msgspec.json.Encoder().encode_lines(lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as log:
        size = os.fstat(log.fileno()).st_size
        if log.write(text) < len(text):
            log.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
