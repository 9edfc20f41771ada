"""Copies blocks between the cache of vLLM's CPU backend and a host tier, which is memory as well.

vLLM's own copies are for GPUs. vLLM loads HostTierSpec by name, in each process of the engine.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

Bytes = NDArray[np.int8]
Places = Sequence[int]  # of blocks


class HostTierSpec(CPUOffloadingSpec):
    """vLLM's, with copies that need no GPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            self._worker: OffloadingWorker = HostCopies(kv_caches, self.num_chunks)
        return self._worker


class HostCopies(OffloadingWorker):
    """A copy is done when the call that asks for it returns."""

    def __init__(self, caches: CanonicalKVCaches, blocks: int) -> None:
        # Of each tensor: [blocks, bytes]. NumPy copies rows several times as fast as torch.
        self._cache = [each.tensor.numpy() for each in caches.tensors]
        self._host = [np.empty((blocks, each.shape[1]), np.int8) for each in self._cache]
        # Of each group: the tensors that have its layers. Groups may share tensors, not blocks.
        self._tensors = [
            sorted({layer.tensor_idx for layer in layers}) for layers in caches.group_data_refs
        ]
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        return self._move(job_id, self._places(src_spec, dst_spec), self._cache, self._host)

    def submit_load(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        places = ((tensor, pair[::-1]) for tensor, pair in self._places(dst_spec, src_spec))
        return self._move(job_id, places, self._host, self._cache)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def _places(
        self, cached: GPULoadStoreSpec, kept: BlockIDsLoadStoreSpec
    ) -> Iterator[tuple[int, tuple[Places, Places]]]:
        """For each tensor: places in the cache and in the tier. Both specs list the blocks of all
        groups, one group after the other."""
        pairs = zip(_ids(cached), _ids(kept), strict=True)
        for tensors, blocks in zip(self._tensors, cached.group_sizes, strict=True):
            if own := list(islice(pairs, blocks)):
                rows, places = zip(*own, strict=True)
                yield from ((tensor, (rows, places)) for tensor in tensors)

    def _move(
        self,
        job_id: int,
        places: Iterable[tuple[int, tuple[Places, Places]]],
        source: Sequence[Bytes],
        to: Sequence[Bytes],
    ) -> bool:
        """places: for each tensor, those in the source and those where the blocks go."""
        began_s, copied_bytes = time.perf_counter(), 0
        for tensor, (rows, goals) in places:
            copied_bytes += _copy(source[tensor], rows, to[tensor], goals)
        took_s = time.perf_counter() - began_s
        self._done.append(TransferResult(job_id, True, copied_bytes, took_s))
        return True


def _ids(spec: BlockIDsLoadStoreSpec) -> Sequence[int]:
    ids: list[int] = spec.block_ids.tolist()
    return ids


def _copy(source: Bytes, rows: Places, to: Bytes, places: Places) -> int:
    """Returns bytes."""
    for row, place in zip(rows, places, strict=True):
        to[place] = source[row]
    row_bytes: int = source.shape[1]
    return len(rows) * row_bytes
