"""Collects the results of one run of a batch, and writes them to the store."""

import asyncio

from kvroute.batch.lines import CustomId
from kvroute.batch.results import result_line, unanswered_line
from kvroute.features.batches.batch_state import BatchState
from kvroute.features.batches.records import KINDS, Kind, Run


class Output:
    """The results of one run. They are in the store only after `sync`.

    After `sync` has failed once, it always fails, since it is unknown which lines were written. The
    batch's next run reads the files and so finds out.
    """

    def __init__(self, state: BatchState, run: Run) -> None:
        self._state = state
        self._run = run
        self._lines = {kind: bytearray() for kind in KINDS}
        self._lock = asyncio.Lock()  # only one call at a time may append to a file
        self._writing = set[asyncio.Task[None]]()
        self._error: OSError | None = None  # why lines could not be written

    def write(self, custom_id: CustomId, *, status: int, request_id: str, body: bytes) -> None:
        """Add the answer to a line."""
        line = result_line(custom_id, status=status, request_id=request_id, body=body)
        self._lines["output" if status < 400 else "errors"] += line

    def write_unanswered(self, custom_id: CustomId, *, code: str, message: str) -> None:
        """Add an error for a line that has no answer, because the batch has ended early."""
        self._lines["errors"] += unanswered_line(custom_id, code=code, message=message)

    async def sync(self) -> None:
        """Write everything to the store. Raises OSError."""
        writing = asyncio.create_task(self._write_all())
        self._writing.add(writing)
        writing.add_done_callback(self._written)
        await asyncio.shield(writing)  # a caller that is cancelled does not stop it

    async def _write_all(self) -> None:
        async with self._lock:
            if self._error:
                raise self._error
            try:
                for kind in KINDS:
                    await self._sync(kind)
            except OSError as error:
                self._error = error
                raise

    def _written(self, writing: "asyncio.Task[None]") -> None:
        self._writing.discard(writing)
        if not writing.cancelled():
            writing.exception()  # keeps asyncio from logging the error, which is in `_error`

    async def _sync(self, kind: Kind) -> None:
        if lines := self._lines[kind]:
            self._lines[kind] = bytearray()
            await self._state.append(self._run, kind, bytes(lines))
