"""The state of one batch in the store, and the rules by which routers change it.

Several routers may try to run a batch at the same time: a router that seems to be dead may only
have been stopped for a while. The store decides which router's results count. A router begins a run
by creating the file `run-N.json` with the next number N, and only one router can create it. This
file says how many bytes of the earlier runs' results count. Likewise, only one router can create
`end.json`. So each line has exactly one result that counts.
"""

import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import Struct

from kvroute.contract.records import encode
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.batches.records import (
    BatchRecord,
    Cancelled,
    End,
    FinalStatus,
    Kind,
    Progress,
    Run,
    Segment,
    Started,
)
from kvroute.features.batches.stores.file_store import CHUNK_BYTES, FileStore

log = logging.getLogger("kvroute.batches")

FOLDER = "batches"
_RUN = re.compile(r"run-(\d+)\.json\Z")

S = TypeVar("S", bound=Struct)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is known about a batch at one moment."""

    record: BatchRecord
    started: Started | None
    run: Run | None  # the latest run
    progress: Progress
    cancelled: Cancelled | None
    end: End | None

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def status(self) -> str:
        """Return the status, by OpenAI's names."""
        if self.end:
            return self.end.status
        if self.cancelled:
            return "cancelling"
        if self.started is None:
            return "validating"
        return "finalizing" if self.progress.finalizing_at else "in_progress"


class BatchState:
    """The state of one batch. All methods raise OSError if the store cannot be used."""

    def __init__(self, store: FileStore, id_: str) -> None:
        self._store = store
        self.id = id_

    def name(self, file: str) -> str:
        """Return the name in the store of a file in the batch's folder."""
        return f"{FOLDER}/{self.id}/{file}"

    async def snapshot(self, known: Snapshot | None = None) -> Snapshot | None:
        """Return the batch's state; None if there is no such batch.

        Args:
            known: an earlier state. What cannot have changed since is not read again.
        """
        names = await self._store.names(f"{FOLDER}/{self.id}")
        number = _latest(names)
        if known is None:
            record = await self._read("batch.json", BatchRecord, names)
            if record is None:
                return None
            known = Snapshot(record, None, None, Progress(), None, None)
        elif "batch.json" not in names:
            return None
        run = known.run
        if run is None or run.number != number:
            run = await self._read(f"run-{number}.json", Run, names)
        return Snapshot(
            known.record,
            started=known.started or await self._read("started.json", Started, names),
            run=run,
            progress=await self._read("progress.json", Progress, names) or Progress(),
            cancelled=known.cancelled or await self._read("cancel.json", Cancelled, names),
            end=known.end or await self._read("end.json", End, names),
        )

    async def create(self, record: BatchRecord) -> None:
        await self._store.create(self.name("batch.json"), encode(record))

    async def cancel(self) -> None:
        """Ask the router that runs the batch to end it."""
        await self._store.create(self.name("cancel.json"), encode(Cancelled(_now())))

    async def is_cancelled(self) -> bool:
        return await self._store.size(self.name("cancel.json")) > 0

    async def claim(self, router: str) -> Run | None:
        """Begin a run.

        Return None if the batch has ended, or if another router has begun a run at the same moment.
        """
        names = await self._store.names(f"{FOLDER}/{self.id}")
        if "end.json" in names:
            return None
        latest = await self._read(f"run-{_latest(names)}.json", Run, names)
        run = Run(
            _latest(names) + 1,
            router,
            output=await self._segments(latest, "output"),
            errors=await self._segments(latest, "errors"),
        )
        name = self.name(f"run-{run.number}.json")
        return run if await self._store.create(name, encode(run)) else None

    async def end_unstarted(self, router: str, status: FinalStatus) -> None:
        """End a batch of which no run has begun; do nothing if one has begun meanwhile."""
        run = Run(1, router)
        if await self._store.create(self.name("run-1.json"), encode(run)):
            await self.finish(run, status)

    async def start(self, total: int) -> None:
        """Record that the input can be used, and that it has `total` lines."""
        await self._store.create(self.name("started.json"), encode(Started(_now(), total)))

    async def report(self, progress: Progress) -> None:
        """Replace the recorded progress."""
        await self._store.replace(self.name("progress.json"), encode(progress))

    async def append(self, run: Run, kind: Kind, lines: bytes) -> None:
        """Write results of a run."""
        await self._store.append(self.name(run.own(kind)), lines)

    async def finish(self, run: Run, status: FinalStatus, **more: object) -> None:
        """End the batch, unless it has ended already."""
        end = End(
            status,
            _now(),
            output=await self._segments(run, "output"),
            errors=await self._segments(run, "errors"),
            **more,  # type: ignore[arg-type]
        )
        await self._store.create(self.name("end.json"), encode(end))

    async def results(self, snapshot: Snapshot, kind: Kind) -> Sequence[Segment]:
        """Return the results so far."""
        if snapshot.end:
            return snapshot.end.segments(kind)
        return await self._segments(snapshot.run, kind)

    async def lines(
        self, segments: Sequence[Segment], start: int, end: int
    ) -> AsyncIterator[bytes]:
        """Join segments in their order, and yield their bytes from `start` to `end`."""
        for segment in segments:
            if start < segment.size and end > 0:
                name, stop = self.name(segment.name), min(end, segment.size)
                async for chunk in self._store.chunks(name, max(0, start), stop):
                    yield chunk
            start, end = start - segment.size, end - segment.size

    async def delete_results(self, kind: Kind) -> None:
        """Delete the results of a batch that has ended."""
        for name in await self._store.names(f"{FOLDER}/{self.id}"):
            if name.startswith(f"{kind}-"):
                await self._store.delete(self.name(name))

    async def delete(self) -> None:
        """Delete the batch with its results."""
        await self._store.delete(f"{FOLDER}/{self.id}")

    async def tidy(self) -> None:
        """Delete the files that only a running batch needs."""
        for name in await self._store.names(f"{FOLDER}/{self.id}"):
            if name.startswith(("index", "remaining-")):
                await self._store.delete(self.name(name))

    async def _segments(self, run: Run | None, kind: Kind) -> tuple[Segment, ...]:
        """Return the segments that count, given the latest run; None: there was no run."""
        if run is None:
            return ()
        size = await self._complete_size(self.name(run.own(kind)))
        own = (Segment(run.own(kind), size),) if size else ()
        return (*run.segments(kind), *own)

    async def _complete_size(self, name: str) -> int:
        """Return the size of a file up to its last complete line."""
        end = await self._store.size(name)
        while end:
            start = max(0, end - CHUNK_BYTES)
            chunk = b"".join([part async for part in self._store.chunks(name, start, end)])
            if (last := chunk.rfind(b"\n")) >= 0:
                return start + last + 1
            end = start
        return 0

    async def _read(self, file: str, kind: type[S], names: Sequence[str]) -> S | None:
        """Return a record; None if it is missing or unreadable."""
        return await read_record(self._store, self.name(file), kind) if file in names else None


async def read_record(store: FileStore, name: str, kind: type[S]) -> S | None:
    """Return a record; None if it is missing or unreadable. Raises OSError."""
    try:
        return msgspec.json.decode(await store.read(name), type=kind)
    except FileNotFoundError:
        return None
    except DECODE_ERRORS as error:
        log.error("%s is not valid and is ignored: %s", name, error)
        return None


def _latest(names: Sequence[str]) -> int:
    """Return the number of the latest run; 0 if there was none."""
    return max((int(found[1]) for name in names if (found := _RUN.match(name))), default=0)


def _now() -> int:
    return int(time.time())
