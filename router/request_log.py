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
from typing import Any

import msgspec

from replica.kvindex.fingerprint import Fingerprint
from replica.protocol import Chunk, GenerateRequest
from router.fleet import Dispatch

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
    replica: str
    expected_tokens: int  # cached there, as far as the router knew
    cached_tokens: int | None  # and as the engine found; None, like ttft_s: there was no token
    predicted_ttft_s: float
    ttft_s: float | None
    duration_s: float
    outcome: str  # ok | cancelled | failed: never ran, or lost with its replica and sent again


class RequestLog:
    """The lines of one router, in one file. A Witness: it learns where requests went, and why."""

    def __init__(self, file: Path, *, block_size: int) -> None:
        self.dropped = 0
        self._file = file
        self._blocks_per_id = -(-ID_TOKENS // block_size)
        self._block_size = block_size
        self._dispatches: dict[str, Dispatch] = {}  # request id -> where it is now
        self._lines: list[Line] = []

    def sent(self, dispatch: Dispatch) -> None:
        self._dispatches[dispatch.request_id] = dispatch

    def first_token(self, request_id: str) -> None: ...

    def ended(self, request_id: str) -> None:
        self._dispatches.pop(request_id, None)

    def add(self, answer: "HeardAnswer", outcome: str) -> None:
        """Notes an answer that is over."""
        dispatch = self._dispatches.get(answer.request_id)
        if dispatch is None or dispatch.placement is None:
            return  # it went nowhere
        if len(self._lines) >= WAITING_LINES:
            self._drop(1, "the disk is slow")
            return
        placement, there = dispatch.placement, dispatch.placement.at(dispatch.replica_id)
        self._lines.append(
            Line(
                timestamp=round(1000 * answer.sent_at, 3),
                input_length=placement.prompt_tokens,
                output_length=answer.output_tokens,
                hash_ids=self._ids(placement.chain),
                block_size=self._blocks_per_id * self._block_size,
                replica=dispatch.replica_id,
                expected_tokens=placement.expected_tokens(dispatch.replica_id),
                cached_tokens=answer.cached_tokens,
                predicted_ttft_s=there.backlog_s + there.own_s + there.copy_s,
                ttft_s=answer.ttft_s,
                duration_s=time.monotonic() - answer.sent_s,
                outcome=outcome,
            )
        )

    async def run(self) -> None:
        """Writes what was added, until cancelled."""
        while True:
            await asyncio.sleep(WRITE_S)
            await self.flush()

    async def flush(self) -> None:
        """Writes what was added since the last time, or drops it."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            await asyncio.to_thread(_append, self._file, lines)
        except OSError as error:
            self._drop(len(lines), str(error))

    def _ids(self, chain: Sequence[Fingerprint]) -> list[int]:
        step = self._blocks_per_id
        return [fingerprint & ID_BITS for fingerprint in chain[step - 1 :: step]]

    def _drop(self, lines: int, why: str) -> None:
        if not self.dropped:
            log.warning("requests are missing in the log %s: %s", self._file, why)
        self.dropped += lines


class HeardReplicas:
    """A handle to the replicas, or to one method of theirs, whose answers a log hears."""

    def __init__(self, handle: Any, log: RequestLog) -> None:
        self._handle = handle
        self._log = log

    def options(self, **options: Any) -> "HeardReplicas":
        return HeardReplicas(self._handle.options(**options), self._log)

    @property
    def generate(self) -> "HeardReplicas":
        return HeardReplicas(self._handle.generate, self._log)

    def remote(self, request: GenerateRequest) -> "HeardAnswer":
        return HeardAnswer(self._handle.remote(request), request, self._log)


class HeardAnswer:
    """A replica's stream of chunks, as Ray Serve gives it; the log has it once it is over."""

    def __init__(self, stream: Any, request: GenerateRequest, log: RequestLog) -> None:
        self.request_id = request.request_id
        self.sent_at, self.sent_s = time.time(), time.monotonic()
        self.ttft_s: float | None = None
        self.output_tokens = 0
        self.cached_tokens: int | None = None
        self._unfinished = request.sampling.n
        self._is_over = False
        self._stream = stream
        self._log = log

    def __aiter__(self) -> "HeardAnswer":
        return self

    async def __anext__(self) -> Chunk:
        try:
            chunk: Chunk = await anext(self._stream)
        except (StopAsyncIteration, asyncio.CancelledError):
            self._end()
            raise
        except Exception:
            self._end("failed")
            raise
        self._hear(chunk)
        return chunk

    def cancel(self) -> None:
        """Harmless once it is over."""
        self._end()
        self._stream.cancel()

    def _hear(self, chunk: Chunk) -> None:
        if self.ttft_s is None:
            self.ttft_s = time.monotonic() - self.sent_s
            self.cached_tokens = chunk.cached_tokens
        self.output_tokens += len(chunk.token_ids)
        self._unfinished -= chunk.finish_reason is not None

    def _end(self, outcome: str | None = None) -> None:
        if not self._is_over:
            self._is_over = True
            self._log.add(self, outcome or ("cancelled" if self._unfinished else "ok"))


def _append(file: Path, lines: Sequence[Line]) -> None:
    """All of them or none: half a line would spoil the log."""
    text = msgspec.json.Encoder().encode_lines(lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as log:
        size = os.fstat(log.fileno()).st_size
        if log.write(text) < len(text):
            log.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
