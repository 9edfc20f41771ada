"""vLLM's scheduler with a KV cache in GPU memory and slower tiers, without a model.

Tests set the time that copies from host memory take.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kvroute.blocks.chain import Space
from kvroute.contract.comparison import Comparison
from kvroute.contract.generation import NO_TOKENS, GenerateRequest
from kvroute.contract.keep import RetentionHint
from kvroute.replica.block_table import BlockTable, Changes
from kvroute.replica.engine.kv_events import KVEvent, Transfers
from kvroute.replica.fabric.pull import Pull, PullResult, carried
from kvroute.settings.replica import ReplicaSettings
from kvroute.wire.tls import OFF
from tests.support.schedulers import BLOCK, request_of, scheduler_of

KEY = b"key"  # key of the block servers
BLOCK_BYTES = 4096  # size of a block of `full(BLOCK)`: vLLM rounds it up to a page of memory


class Tiered:
    """A scheduler, and the block table that its events update.

    `in_s` is the time of each copy from host memory in seconds. Blocks in host memory have bytes
    that depend on their keys. When a block is copied to GPU memory, its bytes are checked.
    """

    def __init__(
        self,
        *specs: Any,
        blocks: int = 24,
        host_blocks: int = 64,
        own: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Create a scheduler.

        Args:
            specs: The groups of the KV cache (kv_managers.py).
            blocks: The size of GPU memory.
            host_blocks: The size of host memory.
            own: kvroute's settings.
            options: vLLM's engine arguments.
        """
        from vllm.config import KVEventsConfig

        from kvroute.replica.vllm_engine.core.scheduler import KvrouteScheduler
        from kvroute.replica.vllm_engine.host.args import host_args
        from tests.support.kv_managers import full

        gb = str(host_blocks * BLOCK_BYTES / 1e9)
        settings = ReplicaSettings(
            served_model_name="m", redis_url="", host_cache_gb=gb, **(own or {})
        )
        self.scheduler = scheduler_of(
            KvrouteScheduler,
            *(specs or (full(BLOCK),)),
            blocks=blocks,
            scheduling_policy="priority",
            max_num_batched_tokens=4096,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
            **options,
            **host_args(settings, node_bytes=1 << 40, on_cpu=True),
        )
        self.division = self.scheduler.begin(Space("m", "", BLOCK))
        self.table, self.changes = BlockTable(self.division.group_entries), Changes()
        self.transfers: list[Transfers] = []
        self.pulled: list[PullResult] = []
        self.in_s = 1e-6
        self.opened: Any = None  # the OpenTiers
        self.requests = 0
        self._unsubmitted: dict[int, Any] = {}  # copies to host memory, which begin one step later
        self.scheduler.kv_event_publisher.publish = self._receive
        self._policy = self.scheduler.host._policy
        tiers = getattr(self.scheduler.connector.scheduler.manager, "secondary_tiers", ())
        self.rows: Any = tiers[0]._rows if tiers else None  # the host memory, if it is shared

    def _receive(self, batch: Any) -> None:
        from kvroute.replica.vllm_engine.blocks.events import Pulled, event_of

        self.pulled += [event.result for event in batch.events if isinstance(event, Pulled)]
        events: Iterable[KVEvent | None] = map(event_of, batch.events)
        received = [event for event in events if event is not None]
        self.transfers += [event for event in received if isinstance(event, Transfers)]
        self.table.apply(received, self.changes)

    def compare(self) -> Comparison:
        """Return how the block table differs from the blocks that the scheduler has cached."""
        self.table.compared = None
        self.scheduler.emit_held()
        assert self.table.compared
        return self.table.compared

    def open(self, weights: str = "w") -> Any:
        """Open the slower tiers, and return the OpenTiers."""
        opened = self.scheduler.host.open("127.0.0.1", [0], KEY, weights, OFF)
        self.scheduler._publish_events()
        self.opened = opened
        return opened

    def close(self) -> None:
        """Shut the connector down. Nothing must refer to its host memory."""
        self.rows = None
        self.scheduler.connector.shutdown()

    def add(
        self,
        first_id: int,
        tokens: int,
        keep: RetentionHint | None = None,
        answer: int = 1,
        pull: Pull | None = None,
        *,
        only_pulls: bool = False,
    ) -> str:
        """Add a request, and return its name."""
        import msgspec

        from kvroute.replica.vllm_engine.host.pull_orders import pull_args

        self.requests += 1
        name = f"r{self.requests}"
        extra: dict[str, Any] = {"kvroute_keep": msgspec.to_builtins(keep)} if keep else {}
        request = GenerateRequest(name, NO_TOKENS, features=carried(pull))
        args = extra | pull_args(request, is_all=only_pulls) or None
        self.scheduler.add_request(
            request_of(name, tokens=tokens, first_id=first_id, max_tokens=answer, extra_args=args)
        )
        return name

    def ask(
        self,
        first_id: int,
        tokens: int,
        keep: RetentionHint | None = None,
        pull: Pull | None = None,
    ) -> int:
        """Run one request alone, and return the number of its cached tokens."""
        name = self.add(first_id, tokens, keep, pull=pull)
        stats = self.scheduler.requests[name].prefill_stats
        self.run()
        cached: int = stats.num_cached_tokens
        return cached

    def run(self) -> None:
        """Run steps until the scheduler has no requests."""
        while self.scheduler.has_requests():
            self.step()

    def step(self) -> None:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        planned = self.scheduler.schedule()
        names = [*planned.num_scheduled_tokens]
        requests = [self.scheduler.requests[name] for name in names]
        drawn = [
            [7] if request.num_computed_tokens >= request.num_tokens else [] for request in requests
        ]
        done, loaded = self._copy(planned.kv_connector_metadata)
        self.scheduler.update_from_output(
            planned,
            ModelRunnerOutput(
                names,
                {name: number for number, name in enumerate(names)},
                drawn,
                kv_connector_output=KVConnectorOutput(
                    finished_recving=loaded, kv_connector_worker_meta=done
                ),
            ),
        )

    def bytes_of(self, key: bytes) -> Any:
        """Return the bytes of a block."""
        seed = int.from_bytes(key[:8], "little")
        return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)

    def _fill(self, rows: Iterable[int]) -> None:
        """Write blocks that are stored to host memory."""
        for row in rows if self.rows is not None else ():
            if key := self._policy._keys.get(row):
                self.rows[row, :BLOCK_BYTES] = self.bytes_of(key)

    def _check(self, rows: Iterable[int]) -> None:
        """Check the bytes of blocks that are copied from host memory."""
        for row in rows if self.rows is not None else ():
            key = self._policy._keys[row]
            assert (self.rows[row, :BLOCK_BYTES] == self.bytes_of(key)).all(), "wrong bytes"

    def _copy(self, jobs: Any) -> tuple[Any, set[str]]:
        """Do a worker's copies: the stores of the step before, and the loads of this step."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )

        done = OffloadingWorkerMetadata()
        for job, entry in self._unsubmitted.items():
            done.mark_completed(job)
            self._fill(entry.dst_spec.block_ids.tolist())
            done.transfer_stats.store.record(BLOCK_BYTES * len(entry.src_spec.block_ids), 1e-6)
        for job, entry in jobs.load_jobs.items():
            done.mark_completed(job)
            self._check(entry.src_spec.block_ids.tolist())
            size = BLOCK_BYTES * len(entry.src_spec.block_ids)
            done.transfer_stats.load.record(size, self.in_s)
        self._unsubmitted = dict(jobs.store_jobs)
        return done, {entry.req_id for entry in jobs.load_jobs.values()}

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
