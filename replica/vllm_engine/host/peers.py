"""The tier of blocks in other replicas' host memory: pulls from them, and serves them.

Nothing is looked up: the request says which peer has how many of its tokens. vLLM reserves rows in
host memory, and asks again in each step whether the blocks have arrived. What has not arrived is a
cache miss and is computed. No block of the KV cache is allocated meanwhile.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import GroupOffloadConfig
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvroute.replica.fabric.protocol import Rows
from kvroute.replica.fabric.pull import PullResult, Reason
from kvroute.replica.fabric.puller import PullEnd, PullRun, Target
from kvroute.replica.fabric.server import MAX_PULLS, BlockServer, Find
from kvroute.replica.vllm_engine.compat import source_of_pulls
from kvroute.replica.vllm_engine.host.events import HostEvents
from kvroute.replica.vllm_engine.host.pull_orders import PullOrder
from kvroute.wire.tls import OFF, WireTls, client_end, server_ends

log = logging.getLogger("kvroute.replica")

# Ends of pulls that say nothing about the peer or the way to it.
NO_FAULTS: frozenset[Reason] = frozenset({"", "gone", "off", "full"})
MAX_FAILED = 1024  # peers whose last failure is remembered


class _Done(NamedTuple):
    job: TransferJob
    order: PullOrder
    end: PullEnd


class PeerTier(SecondaryTierManager):
    """Pulls for one scheduler. vLLM calls all methods in the scheduler's thread."""

    cache_hit_source = source_of_pulls()

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._rows: Rows = np.asarray(primary_kv_view).view(np.uint8)
        self._threads = ThreadPoolExecutor(MAX_PULLS, "pull")
        self._runs: dict[int, PullRun] = {}  # job id -> the pull that runs
        self._done = SimpleQueue[_Done]()
        self._failed_s: dict[str, float] = {}  # peer -> time.monotonic of its last failure
        self._server: BlockServer | None = None
        self._tls = OFF
        self._format = ""  # empty: the tier does not serve and pull yet

    def begin(self, events: HostEvents, groups: Sequence[GroupOffloadConfig]) -> None:
        """Prepare for the first request.

        Args:
            events: Learns the fingerprints of the blocks that arrive.
            groups: vLLM's configurations of the KV cache groups.
        """
        self._events = events
        # The groups with full attention. There, a block is useless without all blocks before it.
        self._chained = {
            group.group_idx for group in groups if group.sliding_window_size_in_chunks is None
        }
        # The pulled tokens are counted in this group.
        self._counted = min(groups, key=lambda group: group.group_idx not in self._chained)

    def serve(
        self,
        host: str,
        ports: Sequence[int],
        *,
        key: bytes,
        format_: str,
        find: Find,
        tls: WireTls,
    ) -> str:
        """Start to serve, and return the address; see BlockServer. Raises OSError."""
        self._server = BlockServer(
            host,
            ports,
            key=key,
            format_=format_,
            find=find,
            rows=self._rows,
            tls=server_ends(tls, key),
        )
        self._format, self._tls = format_, tls
        return self._server.address

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether to pull a block that neither the KV cache nor host memory has."""
        order = req_context.get_state(PullOrder)
        if order is None or order.has_begun or not self._format:
            return LookupResult.MISS
        pull = order.argument.pull
        if order.arrived_s < self._failed_s.get(pull.replica_id, 0.0):
            # A pull of another request has failed since. Requests for one prompt wait for each
            # other's pulls, so each of them would add its own limit to the wait.
            order.result = PullResult(0, 0, 0.0, "lost")
            return LookupResult.MISS
        end = req_context.get_offload_key_position(key)
        return LookupResult.HIT if end and end <= pull.tokens else LookupResult.MISS

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start the pull of all blocks that a request lacks."""
        job, order = job_metadata, job_metadata.req_context.get_state(PullOrder)
        order.has_begun = True
        self._events.expect(order.request, job.keys, job.req_context)
        run = self._runs[job.job_id] = PullRun(self._rows, self._chains(job))
        self._threads.submit(self._run, run, job, order)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Do nothing: FabricManager does not store blocks here."""
        raise AssertionError

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while True:
            try:
                results.append(self._result(self._done.get_nowait()))
            except Empty:
                return results

    def drain_jobs(self) -> None:
        """Abort all pulls, and wait until none of them writes to host memory."""
        for run in self._runs.values():
            run.abort()
        while self._done.qsize() < len(self._runs):
            time.sleep(0.001)

    def shutdown(self) -> None:
        """Stop all threads and forget the host memory, since vLLM unmaps it next."""
        for run in self._runs.values():
            run.abort()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._runs.clear()
        if self._server:
            self._server.close()
        del self._rows, self._primary_kv_view

    def _chains(self, job: TransferJob) -> list[list[Target]]:
        """Return the blocks to pull as chains (PullRun)."""
        ends = job.req_context._offload_key_positions
        targets = sorted(
            (Target(key, row) for key, row in zip(job.keys, job.chunk_ids.tolist(), strict=True)),
            key=lambda target: ends[target.key],
        )
        chains: dict[int, list[Target]] = {}
        others = []
        for target in targets:
            group = get_offload_group_idx(target.key)
            if group in self._chained:
                chains.setdefault(group, []).append(target)
            else:
                others.append([target])
        return [*chains.values(), *others]

    def _run(self, run: PullRun, job: TransferJob, order: PullOrder) -> None:
        """Pull, in a thread. When the end is in the queue, the thread has left the host memory."""
        pull = order.argument.pull
        try:
            end = run.run(
                pull.address,
                key=pull.key,
                format_=self._format,
                deadline_s=order.deadline_s,
                tls=partial(client_end, self._tls, pull.tls, pull.key),
            )
        except Exception:  # without a result, the request would wait for ever
            log.exception("a pull from %s has failed", pull.replica_id)
            end = PullEnd([], 0.0, "lost")
        self._done.put(_Done(job, order, end))

    def _result(self, done: _Done) -> JobResult:
        job, order, end = done
        del self._runs[job.job_id]
        arrived = tuple(end.arrived)
        self._events.forget(set(job.keys).difference(arrived))
        if end.reason not in NO_FAULTS:
            self._remember_failure(order.argument.pull.replica_id)
        group = self._counted
        blocks = sum(get_offload_group_idx(key) == group.group_idx for key in arrived)
        size_bytes, tokens = len(arrived) * self._block_size_bytes, blocks * group.tokens_per_chunk
        order.result = PullResult(tokens, size_bytes, end.took_s, end.reason)
        is_whole = len(arrived) == len(job.keys)
        return JobResult(job.job_id, is_whole, arrived, end.took_s, size_bytes)

    def _remember_failure(self, peer: str) -> None:
        self._failed_s.pop(peer, None)
        self._failed_s[peer] = time.monotonic()
        if len(self._failed_s) > MAX_FAILED:
            del self._failed_s[next(iter(self._failed_s))]
