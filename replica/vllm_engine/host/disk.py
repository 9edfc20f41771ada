"""The tier of blocks on a disk, behind host memory.

Blocks are written when they arrive in host memory, and read when neither the KV cache nor host
memory has them. Threads do this. A thread copies a block into a buffer of its own before it writes
it, and after it has read it. So a disk that hangs keeps no place in host memory for long, and a
read that takes longer than computing is given up.
"""

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvroute.contract.keep import RetentionHint
from kvroute.replica.engine.copy_speed import CopySpeed
from kvroute.replica.fabric.block_files import BlockFiles, StoredBlock, Survey, measured_bytes_per_s
from kvroute.replica.fabric.protocol import Rows
from kvroute.replica.vllm_engine.host.disk_index import DiskIndex
from kvroute.replica.vllm_engine.host.events import HostEvents
from kvroute.replica.vllm_engine.host.meter import Meter

log = logging.getLogger("kvroute.replica")

READERS, WRITERS = 4, 2  # threads
# Maximum share of host memory that waits to be written. Blocks beyond it are not written.
MAX_WAITING_SHARE = 1 / 4
# Maximum share of the time in which a thread lists the folder, to find what other replicas changed.
SURVEY_SHARE = 1 / 100
MIN_SURVEY_S = 1.0  # minimum time between two lists, in seconds; they cost little


@dataclass
class _Transfer:
    """Blocks that a thread writes or reads."""

    job: TransferJob
    blocks: list[tuple[StoredBlock, int]]  # and their rows
    deadline_s: float = float("inf")  # time.monotonic at which a read is given up
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_off: bool = False  # True: the thread no longer touches host memory and makes no file appear
    has_ended: bool = False
    done: list[StoredBlock] = field(default_factory=list)
    took_s: float = 0.0
    missing: list[StoredBlock] = field(default_factory=list)  # they have no usable file
    error: OSError | None = None

    def unless_off(self, action: Callable[[], object]) -> None:
        with self.lock:
            if not self.is_off:
                action()

    def stop(self) -> None:
        with self.lock:
            self.is_off = True


@dataclass
class _Choice:
    """A request's state: whether its blocks are read."""

    reads: bool


class DiskTier(SecondaryTierManager):
    """The disk cache of one scheduler. vLLM calls all methods in the scheduler's thread."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        folder: str,
        max_bytes: int,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._rows: Rows = np.asarray(primary_kv_view).view(np.uint8)
        self._folder, self._max_bytes = Path(folder), max_bytes
        self.capacity_blocks = max_bytes // self._block_size_bytes
        self._index = DiskIndex(self.capacity_blocks)
        self._readers = ThreadPoolExecutor(READERS, "disk-read")
        self._writers = ThreadPoolExecutor(WRITERS, "disk-write")
        self._writes: dict[int, _Transfer] = {}  # job id -> blocks
        self._reads: dict[int, _Transfer] = {}
        self._writing = set[OffloadKey]()  # blocks in the index that have no file yet
        self._waiting_blocks = 0  # blocks that wait to be written
        self._ended = SimpleQueue[_Transfer]()
        self._surveys = SimpleQueue[Survey]()
        self._is_surveying, self._next_survey_s = False, 0.0
        self._written_since = set[OffloadKey]()  # blocks written since the last survey began
        self._files: BlockFiles | None = None  # None: not open yet, or not usable
        self._is_failing = False
        self._changes: list[tuple[StoredBlock, bool]] = []  # True: the block has a file now

    def begin(self, events: HostEvents, meter: Meter) -> None:
        """Prepare for the first request.

        Args:
            events: Knows the blocks' fingerprints.
            meter: Knows the time to compute blocks.
        """
        self._events, self._meter = events, meter

    def measured(self) -> float:
        """Return the speed of reads in bytes per second. Raises OSError: the folder is unusable."""
        bytes_per_s = measured_bytes_per_s(self._folder, self._block_size_bytes)
        self._speed = CopySpeed(bytes_per_s)
        return bytes_per_s

    def open(self, format_: str, *, is_running: bool) -> None:
        """Open the folder; list its files later if there are requests. Raises OSError."""
        files = BlockFiles(self._folder, format_, self._block_size_bytes)
        survey = None if is_running else files.survey(self._max_bytes)
        self._files = files
        if survey:
            self._apply(survey)

    # Methods that vLLM calls.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether to read a block that neither the KV cache nor host memory has."""
        if key not in self._index or key in self._writing:
            return LookupResult.MISS
        choice = req_context.get_state(_Choice)
        if choice is None:
            choice = _Choice(self._is_cheaper(key, req_context))
            req_context.set_state(choice)
        return LookupResult.HIT if choice.reads else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start to write blocks that have arrived in host memory."""
        job, files = job_metadata, self._files
        pairs = zip(job.keys, job.chunk_ids.tolist(), strict=True)
        new = [pair for pair in pairs if files and pair[0] not in self._index]
        blocks = [
            (StoredBlock(key, fingerprint), row)
            for key, row in new
            if (fingerprint := self._events.fingerprint(key)) is not None
        ]
        ends = job.req_context._offload_key_positions
        blocks.sort(key=lambda pair: ends.get(OffloadKey(pair[0].key), 0))
        room = max(0, int(MAX_WAITING_SHARE * len(self._rows)) - self._waiting_blocks)
        self._meter.record_disk(failures=max(0, len(blocks) - room))
        blocks = blocks[: min(room, self._index.limit)]
        transfer = self._writes[job.job_id] = _Transfer(job, blocks)
        self._evicted(self._index.add([block for block, _ in blocks]))
        self._writing.update(OffloadKey(block.key) for block, _ in blocks)
        self._waiting_blocks += len(blocks)
        if blocks and files:
            self._writers.submit(self._write, files, transfer)
        else:
            self._ended.put(transfer)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start to read blocks into host memory."""
        job, files = job_metadata, self._files
        ends = job.req_context._offload_key_positions
        pairs = zip(job.keys, job.chunk_ids.tolist(), strict=True)
        known = [pair for pair in pairs if pair[0] in self._index]
        known.sort(key=lambda pair: ends[pair[0]])
        blocks = [(self._index.stored(key), row) for key, row in known]
        self._events.expect_known(block for block, _ in blocks)
        transfer = self._reads[job.job_id] = _Transfer(job, blocks, self._deadline_s(job))
        if files:
            self._readers.submit(self._read, files, transfer)
        else:
            self._ended.put(transfer)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._survey()
        now_s, results = time.monotonic(), []
        for transfer in [each for each in self._reads.values() if now_s > each.deadline_s]:
            transfer.stop()
            results.append(self._read_result(transfer))
        while True:
            try:
                transfer = self._ended.get_nowait()
            except Empty:
                return results
            if transfer.job.job_id in self._reads:
                results.append(self._read_result(transfer))
            elif transfer.job.job_id in self._writes:
                results.append(self._write_result(transfer))

    def drain_jobs(self) -> None:
        """Stop all reads and writes. A thread may still wait for the disk, which does no harm."""
        for transfer in (*self._reads.values(), *self._writes.values()):
            transfer.stop()
            self._ended.put(transfer)

    def shutdown(self) -> None:
        """Forget the host memory, since vLLM unmaps it next."""
        for transfer in (*self._reads.values(), *self._writes.values()):
            transfer.stop()
        for threads in (self._readers, self._writers):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._files:
            self._files.close()
        del self._rows, self._primary_kv_view

    # Methods that kvroute calls.

    def clear(self) -> None:
        """Delete all blocks. vLLM has called drain_jobs before."""
        self._index.clear()
        self._writing.clear()
        self._changes.clear()
        if self._files:
            try:
                trash = self._files.clear()
            except OSError as error:
                self._fail(error)
            else:
                self._writers.submit(shutil.rmtree, trash, ignore_errors=True)

    def record_use(self, keys: Sequence[OffloadKey], hint: RetentionHint) -> None:
        """Set the retention of an ended request's blocks."""
        self._index.record_use(keys, hint)

    def end(self, session: int) -> None:
        """End a session. The blocks that only it uses are then evicted first."""
        self._index.end(session)

    def keys(self) -> list[OffloadKey]:
        """Return the blocks that can be read."""
        return [*(self._index.keys() - self._writing)]

    def take_events(self) -> Iterable[Any]:
        return ()

    def take_changes(self) -> list[KVCacheEvent]:
        """Return events about the blocks that were written and deleted since the last call."""
        changes, self._changes = self._changes, []
        return self._events.disk_events(changes) if changes else []

    def _is_cheaper(self, key: OffloadKey, context: ReqContext) -> bool:
        """Return whether reading a prompt's blocks from this one on is faster than computing."""
        group, ends = get_offload_group_idx(key), context._offload_key_positions
        later = sorted(
            (end, other)
            for other, end in ends.items()
            if end >= ends[key] and get_offload_group_idx(other) == group
        )
        blocks = 0
        for _, other in later:
            if other not in self._index:
                break
            blocks += 1
        block_tokens = ends[key] if len(later) < 2 else later[1][0] - later[0][0]
        start = max(0, ends[key] - block_tokens)
        end, price = start + blocks * block_tokens, self._meter.price
        if price is None:
            return True
        now_s = time.monotonic()
        read_s = blocks * self._block_size_bytes / self._speed.bytes_per_s(now_s)
        return bool(read_s + price.reload_s(end - start, now_s) < price.compute_s(start, end))

    def _deadline_s(self, job: TransferJob) -> float:
        """Return when computing a job's blocks would have ended."""
        ends = sorted(job.req_context._offload_key_positions[key] for key in job.keys)
        price = self._meter.price
        if price is None:
            return float("inf")
        start = max(0, ends[0] - (ends[1] - ends[0] if len(ends) > 1 else ends[0]))
        return time.monotonic() + price.compute_s(start, ends[-1])

    def _write(self, files: BlockFiles, transfer: _Transfer) -> None:
        """Write blocks, in a thread."""
        buffer = np.empty(self._block_size_bytes, np.uint8)
        try:
            for block, row in transfer.blocks:
                transfer.unless_off(lambda row=row: np.copyto(buffer, self._rows[row]))  # type: ignore[misc]
                if transfer.is_off:
                    break
                files.write(block, buffer, transfer.unless_off)
                if not transfer.is_off:
                    transfer.done.append(block)
        except OSError as error:
            transfer.error = error
        except Exception:
            log.exception("writing to the disk cache has failed")
        self._ended.put(transfer)

    def _read(self, files: BlockFiles, transfer: _Transfer) -> None:
        """Read blocks, in a thread, until one is missing."""
        buffer, began_s = np.empty(self._block_size_bytes, np.uint8), time.monotonic()
        try:
            for block, row in transfer.blocks:
                if transfer.is_off:
                    break
                if not files.read(block, buffer):
                    transfer.missing.append(block)
                    break

                def arrive(block: StoredBlock = block, row: int = row) -> None:
                    np.copyto(self._rows[row], buffer)
                    transfer.done.append(block)

                transfer.unless_off(arrive)
        except OSError as error:
            transfer.error = error
        except Exception:
            log.exception("reading from the disk cache has failed")
        transfer.took_s = time.monotonic() - began_s
        self._ended.put(transfer)

    def _read_result(self, transfer: _Transfer) -> JobResult:
        job = transfer.job
        del self._reads[job.job_id]
        arrived = tuple(OffloadKey(block.key) for block in transfer.done)
        is_whole = len(arrived) == len(job.keys)
        self._events.forget(set(job.keys).difference(arrived))
        for block in transfer.missing:
            if self._index.remove(OffloadKey(block.key)):
                self._changes.append((block, False))
        if transfer.error:
            self._fail(transfer.error)
        if not is_whole and (choice := job.req_context.get_state(_Choice)):
            choice.reads = False  # the rest is computed
        size_bytes = len(arrived) * self._block_size_bytes
        failures = len(transfer.missing) + bool(transfer.error) + transfer.is_off
        self._meter.record_disk(in_bytes=size_bytes, in_s=transfer.took_s, failures=failures)
        if transfer.is_off:  # it has taken at least this long
            transfer.took_s = time.monotonic() - job.submit_time
        self._speed.record(size_bytes, transfer.took_s, time.monotonic())
        return JobResult(job.job_id, is_whole, arrived, transfer.took_s, size_bytes)

    def _write_result(self, transfer: _Transfer) -> JobResult:
        job = transfer.job
        del self._writes[job.job_id]
        self._waiting_blocks -= len(transfer.blocks)
        done = set(transfer.done)
        for block, _ in transfer.blocks:
            key = OffloadKey(block.key)
            self._writing.discard(key)
            if block in done and key in self._index:
                self._changes.append((block, True))
                self._written_since.add(key)
            elif block in done:
                self._remove_file(block)  # it was evicted meanwhile
            else:
                self._index.remove(key)
        if transfer.error:
            self._fail(transfer.error)
            self._evicted(self._index.set_limit(len(self._index)))  # until the next survey
            self._meter.record_disk(failures=len(transfer.blocks) - len(done))
        elif done and self._is_failing:
            self._is_failing = False
            log.info("the disk cache %s can be written again", self._folder)
        self._meter.record_disk(out_bytes=len(done) * self._block_size_bytes)
        return JobResult(job.job_id, True)

    def _evicted(self, blocks: Iterable[StoredBlock]) -> None:
        """Delete the files of blocks that are no longer in the index."""
        for block in blocks:
            if OffloadKey(block.key) not in self._writing:
                self._changes.append((block, False))
                self._remove_file(block)

    def _fail(self, error: OSError) -> None:
        """Log the first of a series of errors."""
        if not self._is_failing:
            self._is_failing = True
            log.warning(
                "the disk cache %s has failed, so blocks are computed instead: %s; free space or "
                "replace the disk",
                self._folder,
                error,
            )

    def _survey(self) -> None:
        """Apply a survey of the folder that has ended, and start the next one when it is due."""
        with contextlib.suppress(Empty):
            self._apply(self._surveys.get_nowait())
        now_s = time.monotonic()
        if self._files and not self._is_surveying and now_s > self._next_survey_s:
            self._is_surveying = True
            self._written_since.clear()
            self._writers.submit(self._list, self._files)

    def _list(self, files: BlockFiles) -> None:
        """Survey the folder, in a thread."""
        began_s, survey = time.monotonic(), None
        try:
            survey = files.survey(self._max_bytes)
        except OSError as error:
            log.debug("the disk cache cannot be listed: %s", error)
        took_s = time.monotonic() - began_s
        self._next_survey_s = time.monotonic() + max(MIN_SURVEY_S, took_s / SURVEY_SHARE)
        if survey:
            self._surveys.put(survey)
        self._is_surveying = False

    def _apply(self, survey: Survey) -> None:
        """Take over what other replicas have written to the folder and deleted from it."""
        known = self._writing | self._written_since
        known.update(OffloadKey(block.key) for block in survey.blocks)
        for key in self._index.keys() - known:
            if block := self._index.remove(key):
                self._changes.append((block, False))
        others_blocks = -(-survey.others_bytes // self._block_size_bytes)
        self._evicted(self._index.set_limit(self.capacity_blocks - others_blocks))
        by_key = {OffloadKey(block.key): block for block in survey.blocks}
        new = [
            block
            for key, block in by_key.items()
            if key not in self._index and self._events.has_group(key)
        ]
        surplus = max(0, len(new) + len(self._index) - self._index.limit)
        for block in new[:surplus]:
            self._remove_file(block)
        new = new[surplus:]
        self._index.add(new[::-1])  # the block that was used last is evicted last
        self._changes += [(block, True) for block in new]

    def _remove_file(self, block: StoredBlock) -> None:
        if self._files:
            self._writers.submit(self._files.remove, block)
