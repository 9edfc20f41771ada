"""Runs batches: each router looks for batches that nobody runs, and takes some of them."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress

import httpx

from kvroute.batch.usage import TokenUsage
from kvroute.batch.window import Window
from kvroute.features.batches.batch_leases import LEASE_S, BatchLeases
from kvroute.features.batches.batch_run import BatchRun, Environment
from kvroute.features.batches.batch_state import Snapshot
from kvroute.features.batches.batches import Batches
from kvroute.features.batches.files import Files
from kvroute.features.batches.records import BatchRecord
from kvroute.features.batches.stores.file_store import FileStore
from kvroute.store.connection import REDIS_ERRORS

log = logging.getLogger("kvroute.batches")

LOOK_S = 1.0  # seconds between two looks for batches that nobody runs
TIDY_S = 600.0  # seconds between two deletions of expired files
RETRY_S, MAX_RETRY_S = 5.0, 60.0  # pause after a failed run of a batch; it doubles each time
# A router waits this many seconds longer, for each batch that it runs, before it looks for another
# batch. So routers with fewer batches take the next one, and batches spread over the routers.
POLITE_S = 0.5
# At each look, a router takes at most its free places divided by this number, or one batch, so that
# other routers get some of the batches, too.
SPREAD = 4
MAX_RUNS = 16  # the most batches that a router runs at the same time
MAX_ENDING = 4  # besides MAX_RUNS batches, a router may end this many cancelled or expired ones
CHECKED_AT_ONCE = 2  # the most files that are checked at the same time


class BatchRunner:
    """The batches that this router runs.

    Args:
        router: id of this router.
        store: where batches and files are.
        files: the files of the Files API.
        batches: the batches of the Batch API.
        leases: which router runs a batch.
        client: returns a client that sends requests for the tenant of a batch.
        may_run: returns whether the tenant of a batch still has an API key.
        max_open: the most requests that all batches of this router may have open.
        max_line_bytes: batches with longer lines fail.
        threads: reads lines.
    """

    def __init__(
        self,
        router: str,
        store: FileStore,
        files: Files,
        batches: Batches,
        *,
        leases: BatchLeases,
        client: Callable[[BatchRecord], httpx.AsyncClient],
        may_run: Callable[[BatchRecord], bool],
        max_open: int,
        max_line_bytes: int,
        threads: Executor,
    ) -> None:
        self._router = router
        self._batches = batches
        self._files = files
        self._leases = leases
        self._max_open = max_open
        # The batches of this router share one window. With a window of its own, each batch would
        # open more and more requests, to get more answers than the others.
        self._window = Window(lambda: max_open)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.runs: dict[str, BatchRun] = {}
        # The batches of all routers that had not ended when this router last looked.
        self.unfinished: Sequence[Snapshot] = ()
        self._reasons: dict[str, str] = {}  # batch -> why its latest run has failed
        self._completed = self._failed = 0  # lines of runs that have ended
        self._usage = TokenUsage()  # tokens of these lines
        self.problem = ""  # why the store cannot be used; empty: it can
        self._environment = Environment(
            router,
            store,
            files,
            batches,
            client=client,
            may_run=may_run,
            window=lambda: self._window,
            share=self._share,
            max_line_bytes=max_line_bytes,
            threads=threads,
            checks=asyncio.Semaphore(CHECKED_AT_ONCE),
        )

    async def run(self) -> None:
        """Run batches until cancelled."""
        tidied_s = asyncio.get_running_loop().time()
        try:
            while True:
                await asyncio.sleep(LOOK_S + POLITE_S * len(self._tasks))
                await self._look()
                if asyncio.get_running_loop().time() - tidied_s > TIDY_S:
                    tidied_s = asyncio.get_running_loop().time()
                    with suppress(OSError):
                        await self._files.delete_expired(await self._batches.inputs())
                        await self._batches.delete_old()
                        await self._files.tidy()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """End the runs of this router, so that other routers can go on with them."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        """Take some of the batches that nobody runs: one, or more if many wait."""
        try:
            waiting = await self._unfinished()
            self.unfinished, self.problem = [*waiting], ""
        except OSError as error:
            if not self.problem:
                log.error("batches cannot be read: %s", error)
            self.problem = str(error)
            return
        if len(self._tasks) >= MAX_RUNS:
            # Take only cancelled and expired batches, which do not wait until other batches end.
            now_s, most = self._files.clock.now_s(), MAX_RUNS + MAX_ENDING
            waiting = [
                found
                for found in waiting
                if (found.cancelled or found.record.expires_at <= now_s) and len(self._tasks) < most
            ]
        running = Counter(
            found.record.tenant for found in waiting if found.record.id in self._tasks
        )
        # Tenants with few running batches come first, and then the oldest batches.
        waiting.sort(key=lambda found: (running[found.record.tenant], found.record.created_at))
        others = [snapshot for snapshot in waiting if snapshot.id not in self._tasks]
        left = max(1, min(len(others), MAX_RUNS - len(self._tasks)) // SPREAD)
        for snapshot in others:
            id_ = snapshot.id
            try:
                if await self._leases.take(id_):
                    if not self._tasks:
                        self._window = Window(lambda: self._max_open)
                    self._tasks[id_] = asyncio.create_task(self._own(snapshot.record))
                    left -= 1
                if not left:
                    return
            except REDIS_ERRORS:
                return  # without Redis, a router takes no further batches

    async def _unfinished(self) -> list[Snapshot]:
        """Return the batches that have not ended; end those that have expired before any run."""
        now_s = self._files.clock.now_s()
        found = [snapshot for snapshot in await self._batches.listed(None) if not snapshot.end]
        unfinished = list[Snapshot]()
        for snapshot in found:
            if snapshot.run is None and snapshot.record.expires_at <= now_s:
                await self._batches.end_expired(snapshot)
            else:
                unfinished.append(snapshot)
        return unfinished

    async def _own(self, record: BatchRecord) -> None:
        """Run a batch for as long as this router has its lease."""
        try:
            keeping = asyncio.create_task(self._keep_lease(record.id))
            working = asyncio.create_task(self._work(record))
            try:
                await asyncio.wait({keeping, working}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                keeping.cancel()
                working.cancel()
                results = await asyncio.gather(keeping, working, return_exceptions=True)
                for result in results:
                    if isinstance(result, Exception):
                        log.error("batch %s failed", record.id, exc_info=result)
        finally:
            with suppress(*REDIS_ERRORS):
                await self._leases.release(record.id)
            self._tasks.pop(record.id, None)
            self._reasons.pop(record.id, None)

    async def _keep_lease(self, id_: str) -> None:
        """Renew a lease until another router has it."""
        while True:
            await asyncio.sleep(LEASE_S / 3)
            try:
                if not await self._leases.take(id_):
                    log.warning("another router runs batch %s now", id_)
                    return
            except REDIS_ERRORS:
                continue  # without Redis, no other router can take it

    async def _work(self, record: BatchRecord) -> None:
        """Run a batch to its end; try again if a run fails."""
        pause_s = RETRY_S
        while True:
            run = self.runs[record.id] = BatchRun(self._environment, record)
            try:
                await run.run()
                return
            except Exception as error:  # whatever is wrong with a batch must not end the runner
                if record.id not in self._reasons:
                    is_known = isinstance(error, OSError)
                    log.error("batch %s pauses: %s", record.id, error, exc_info=not is_known)
                self._reasons[record.id] = str(error) or type(error).__name__
            finally:
                self._count(run)
                self.runs.pop(record.id, None)
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_RETRY_S, 2 * pause_s)

    @property
    def paused(self) -> dict[str, str]:
        """Return the batches that wait for their next run, and why their latest one has failed."""
        return {id_: why for id_, why in [*self._reasons.items()] if id_ not in self.runs}

    @property
    def completed(self) -> int:
        """Return the number of lines that this router has answered without an error."""
        return self._completed + sum(run.answered for run in [*self.runs.values()])

    @property
    def failed(self) -> int:
        """Return the number of lines that this router has answered with an error."""
        return self._failed + sum(run.progress.failed for run in [*self.runs.values()])

    @property
    def usage(self) -> TokenUsage:
        """Return the tokens of all lines that this router has answered."""
        return sum((run.progress.usage for run in [*self.runs.values()]), self._usage)

    def _count(self, run: BatchRun) -> None:
        """Keep the counts of a run that ends."""
        self._completed += run.answered
        self._failed += run.progress.failed
        self._usage += run.progress.usage

    def _share(self) -> int:
        """Return the most requests that one batch may have open."""
        return max(1, self._window.size // max(1, len(self._tasks)))
