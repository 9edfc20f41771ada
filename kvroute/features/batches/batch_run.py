"""One run of a batch by this router, from the check of its file to its end."""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import numpy as np

from kvroute.batch import prepare
from kvroute.batch.lines import Fault, Lines
from kvroute.batch.prepare import Part, Preparation, Prepared, open_index
from kvroute.batch.run import Runner, RunProgress
from kvroute.batch.window import Window
from kvroute.contract.priority import less_urgent
from kvroute.features.batches.batch_state import BatchState, Snapshot
from kvroute.features.batches.batches import Batches
from kvroute.features.batches.files import Files
from kvroute.features.batches.output import Output
from kvroute.features.batches.records import KINDS, BatchRecord, FinalStatus, Progress, Run
from kvroute.features.batches.stores.file_store import FileStore
from kvroute.router.api.errors import ApiError
from kvroute.router.api.urgency import PRIORITY

# A run reports its progress, and checks whether it has to end, once per this many seconds.
REPORT_S = 1.0
# When a batch ends early, the errors of its remaining lines are written in chunks of this many
# lines, so that they take little memory.
CHUNK_LINES = 2000
# A batch is late if, at its present speed, it needs more than this share of the time that is left.
# The rest is a reserve for changes of the speed.
LATE = 0.8
# Why a batch has ended. refused: its tenant has no API key any more.
Reason = Literal["done", "expired", "cancelled", "refused"]
UNANSWERED: Mapping[Reason, tuple[str, str]] = {  # code and message of lines without an answer
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": (
        "batch_cancelled",
        "This request was not executed, because its batch was cancelled.",
    ),
    "refused": (
        "invalid_api_key",
        "This request was not executed, because its tenant has no API key any more.",
    ),
}


NO_KEY = Fault(None, "invalid_api_key", "The tenant of this batch has no API key any more.")
FINAL_STATUS: Mapping[Reason, FinalStatus] = {  # why a batch has ended -> its status
    "done": "completed",
    "expired": "expired",
    "cancelled": "cancelled",
    "refused": "failed",
}


@dataclass(frozen=True, slots=True)
class Environment:
    """What all runs of this router use; BatchRunner explains the fields."""

    router: str
    store: FileStore
    files: Files
    batches: Batches
    client: Callable[[BatchRecord], httpx.AsyncClient]
    may_run: Callable[[BatchRecord], bool]
    window: Callable[[], Window]
    share: Callable[[], int]
    max_line_bytes: int
    threads: Executor  # reads lines
    checks: asyncio.Semaphore  # limits how many files are checked at the same time


@dataclass
class _Speed:
    """How fast lines are answered."""

    start_s: float = field(default_factory=time.monotonic)
    done: int = 0  # lines that already had a result when this run started to send

    def needed_s(self, progress: RunProgress) -> float:
        """Return the seconds until all lines are done, at the present speed."""
        answered = progress.done - self.done
        if answered <= 0:
            return 0.0
        elapsed_s = time.monotonic() - self.start_s
        return elapsed_s / answered * (progress.total - progress.done)


class BatchRun:
    """One run of a batch."""

    def __init__(self, environment: Environment, record: BatchRecord) -> None:
        self._environment = environment
        self.record = record
        self._state = BatchState(environment.store, record.id)
        self._before = Prepared()  # the results of earlier runs
        self._given_up = 0  # lines that got an error because the batch has ended
        self._reported = Progress()
        self._used: list[str] = []  # files of the store whose paths this run uses
        self._output: Output | None = None  # None: no line was sent yet
        self.progress = RunProgress(0)
        self._speed = _Speed()

    async def run(self) -> None:
        """Run the batch to its end.

        Raises:
            OSError: the store cannot be used.
        """
        run = await self._state.claim(self._environment.router)
        snapshot = await self._state.snapshot()
        if run is None or snapshot is None:
            return
        try:
            await self._run(run, snapshot)
        finally:
            with suppress(OSError):
                await self._state.tidy()
            for name in self._used:
                await self._environment.store.release(name)

    async def _run(self, run: Run, snapshot: Snapshot) -> None:
        path, faults = await self._input()
        if not faults:
            preparing = asyncio.create_task(self._prepare(run, path))
            if snapshot.started is None and (reason := await self._until_end(preparing)) != "done":
                faults = (NO_KEY,) if reason == "refused" else ()
                await self._state.finish(run, FINAL_STATUS[reason], faults=faults)
                return
            self._before = await preparing
            faults = self._before.faults
        if faults:
            progress = snapshot.progress
            await self._state.finish(run, "failed", faults=faults, progress=progress)
            return
        await self._state.start(self._before.total)
        lines = await asyncio.to_thread(open_index, path, await self._own_path("index"))
        with closing(lines):
            await self._answer(run, lines)

    def counted(self) -> Progress:
        """Return the counts and the usage of this run and all earlier runs together."""
        before, progress = self._before, self.progress
        return Progress(
            completed=before.completed + self.answered,
            failed=before.failed + progress.failed + self._given_up,
            usage=before.usage + progress.usage,
        )

    @property
    def answered(self) -> int:
        """Return the number of lines that this run has answered without an error."""
        before, progress = self._before, self.progress
        return max(0, progress.done - before.completed - before.failed - progress.failed)

    @property
    def left(self) -> int:
        """Return the number of lines without a result."""
        return self.progress.total - self.progress.done

    @property
    def needed_s(self) -> float:
        """Return the seconds until the batch ends, at its present speed; 0: unknown."""
        return self._speed.needed_s(self.progress)

    async def _input(self) -> tuple[Path, tuple[Fault, ...]]:
        """Return the path of the input, or why there is none."""
        files, record = self._environment.files, self.record
        try:
            file = await files.find(record.input_file_id, record.tenant)
        except ApiError as error:
            return Path(), (Fault(None, "input_file_missing", str(error)),)
        return await self._path(files.name_of(file)), ()

    async def _prepare(self, run: Run, path: Path) -> Prepared:
        """Check and order the lines in a child process, and find those without a result."""
        parts = [
            Part(str(await self._own_path(segment.name)), segment.size, kind == "errors")
            for kind in KINDS
            for segment in run.segments(kind)
        ]
        job = Preparation(
            str(path),
            self.record.endpoint,
            index=str(await self._own_path("index")),
            remaining=str(await self._own_path(_remaining(run))),
            parts=tuple(parts),
            max_line_bytes=self._environment.max_line_bytes,
        )
        async with self._environment.checks:
            return await _prepared(job)

    async def _answer(self, run: Run, lines: Lines) -> None:
        """Answer the lines without a result, and end the batch."""
        remaining = await self._own_path(_remaining(run))
        order = await asyncio.to_thread(np.load, remaining)
        await asyncio.to_thread(remaining.unlink)
        output = self._output = Output(self._state, run)
        client = self._environment.client(self.record)
        runner = Runner(
            client,
            lines.read,
            order,
            output,
            total=len(lines),
            window=self._environment.window(),
            max_open=self._environment.share,
            headers=self._headers,
            max_tries=None,
            threads=self._environment.threads,
        )
        self.progress = runner.progress
        self._speed = _Speed(done=runner.progress.done)
        async with client:
            answering = asyncio.create_task(runner.run(lambda progress: None))
            reason = await self._until_end(answering)
        finalizing_at = int(time.time())
        await self._report(finalizing_at)
        if reason != "done":
            await self._give_up(lines, runner.left, output, reason)
        await self._report(finalizing_at)
        await self._state.finish(run, FINAL_STATUS[reason], progress=self._reported)

    async def _until_end(self, working: "asyncio.Task[Any]") -> "Reason":
        """Wait until a task is done or the batch has to end, and return which of them it was.

        If the batch has to end, the task is cancelled.
        """
        try:
            while not working.done():
                if self._environment.files.clock.now_s() >= self.record.expires_at:
                    return "expired"
                if await self._state.is_cancelled():
                    return "cancelled"
                if not self._environment.may_run(self.record):
                    return "refused"
                await asyncio.wait({working}, timeout=REPORT_S)
                if not working.done():
                    await self._report()
            working.result()
            return "done"
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _report(self, finalizing_at: int | None = None) -> None:
        """Write the results to the store, then the progress, which counts only written results."""
        progress = msgspec.structs.replace(self.counted(), finalizing_at=finalizing_at)
        if self._output:
            await self._output.sync()
        if progress == msgspec.structs.replace(self._reported, updated_at=0):
            return
        progress = msgspec.structs.replace(progress, updated_at=int(time.time()))
        if progress.completed and not self._reported.completed:
            await self._environment.batches.register_results(self.record, "output")
        if progress.failed and not self._reported.failed:
            await self._environment.batches.register_results(self.record, "errors")
        await self._state.report(progress)
        self._reported = progress

    async def _give_up(
        self, lines: Lines, left: Sequence[int], output: Output, reason: "Reason"
    ) -> None:
        """Write an error for each line that is left."""
        code, message = UNANSWERED[reason]
        for first in range(0, len(left), CHUNK_LINES):
            indexes = left[first : first + CHUNK_LINES]
            ids = await asyncio.to_thread(lambda: [lines.read(i).custom_id for i in indexes])  # noqa: B023
            for custom_id in ids:
                output.write_unanswered(custom_id, code=code, message=message)
            await output.sync()
            self._given_up += len(ids)

    def _headers(self) -> Mapping[str, str]:
        """Return the headers of the next request.

        Lines have the priority class `batch`. In a late batch, they have the class `default`, or
        the class of the batch's API key if that is less urgent.
        """
        left_s = self.record.expires_at - self._environment.files.clock.now_s()
        is_late = self.needed_s > LATE * left_s
        priority = less_urgent(self.record.priority, "default") if is_late else "batch"
        return {PRIORITY: priority, "content-type": "application/json"}

    async def _own_path(self, file: str) -> Path:
        """Return the path of a file in the batch's folder, until the end of the run."""
        return await self._path(self._state.name(file))

    async def _path(self, name: str) -> Path:
        """Return the path of a file of the store, until the end of the run."""
        path = await self._environment.store.path_of(name)
        self._used.append(name)
        return path


async def _prepared(job: Preparation) -> Prepared:
    """Do a job in a child process. Raises OSError."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", prepare.__name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, problem = await process.communicate(msgspec.json.encode(job))
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    if process.returncode:
        raise OSError(f"its lines cannot be read: {problem.decode(errors='replace')[-300:]}")
    return msgspec.json.decode(output, type=Prepared)


def _remaining(run: Run) -> str:
    """Return the name of the file for the indexes of the lines without a result."""
    return f"remaining-{run.number}.npy"
