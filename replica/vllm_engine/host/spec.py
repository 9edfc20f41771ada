"""A host tier with slower tiers behind it: other replicas' host memory, and a disk.

vLLM loads FabricSpec by name in each process of the engine. vLLM's tiering copies blocks from
slower tiers, which are PeerTier and DiskTier here, to host memory, and then to the KV cache as any
other block of the host tier. The scheduler's process and the workers share the host memory.
"""

import os

import numpy as np
from numpy.typing import NDArray
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    JobMetadata,
    TieringOffloadingManager,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvroute.replica.vllm_engine.host.connector import Manager
from kvroute.replica.vllm_engine.host.copies import HostCopies
from kvroute.replica.vllm_engine.host.disk import DiskTier
from kvroute.replica.vllm_engine.host.peers import PeerTier
from kvroute.replica.vllm_engine.process.quick_end import end_quickly


class FabricSpec(TieringOffloadingSpec):
    """vLLM's specification of tiers, changed to need no GPU and to leave no file behind."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            _keep_file(region)

            def allocate(row_bytes: int) -> NDArray[np.int8]:
                view: NDArray[np.int8] = region.create_next_worker_view(row_bytes).numpy()
                return view

            self._worker: OffloadingWorker = HostCopies(kv_caches, allocate, region.cleanup)
        return self._worker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> CPUOffloadingWorker:
        worker = super().create_worker(kv_caches)
        _keep_file(worker._mmap_region)
        return worker

    def get_manager(self) -> OffloadingManager:
        is_new = not self._manager
        manager = super().get_manager()
        if is_new:
            _remove_file(self._scheduler_mmap)
            _change(manager)
        return manager


class FabricManager(TieringOffloadingManager):
    """vLLM's manager of tiers, changed to store blocks only in tiers that store them."""

    def _should_store_to_tier(self, tier: SecondaryTierManager, num_blocks: int) -> bool:
        return not isinstance(tier, PeerTier) and super()._should_store_to_tier(tier, num_blocks)

    def _complete_promotion(self, job_metadata: JobMetadata, completed_job: JobResult) -> None:
        """Complete the copy of blocks to host memory; write pulled blocks to the disk cache."""
        super()._complete_promotion(job_metadata, completed_job)
        job, tiers = job_metadata.transfer_job, self.secondary_tiers
        arrived = job.keys if completed_job.success else completed_job.successful_keys
        if not arrived or not isinstance(tiers[job_metadata.tier_idx], PeerTier):
            return
        for number, tier in enumerate(tiers):
            if isinstance(tier, DiskTier):
                tier.submit_store(self.create_store_job(arrived, job.req_context, number))


class PrimaryManager(Manager, CPUPrimaryTierOffloadingManager):
    """vLLM's manager of host memory beside slower tiers, with the changes of Manager."""


def _change(manager: TieringOffloadingManager) -> None:
    manager.__class__ = FabricManager
    primary = manager.primary_tier
    primary.__class__ = PrimaryManager
    # vLLM has set these aliases to its own methods.
    primary.complete_read = primary.complete_load
    primary.prepare_write = primary.prepare_store
    primary.complete_write = primary.complete_store


def _keep_file(region: SharedOffloadRegion) -> None:
    """Make a worker not remove the file of the host memory, which the scheduler removes."""
    end_quickly()  # vLLM calls this in each worker's process
    region._creator = False


def _remove_file(region: SharedOffloadRegion) -> None:
    """Remove the name of the host memory, which all workers have mapped by now.

    So the kernel frees the memory when the engine's last process ends, even if it is killed.
    """
    region._creator = False
    os.unlink(region.mmap_path)
