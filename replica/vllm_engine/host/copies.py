"""Copies blocks between the cache of vLLM's CPU backend and a host tier.

vLLM's own copies need a GPU. vLLM loads HostTierSpec by name, in each process of the engine.
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
Places = Sequence[int]  # indices of blocks in the cache or in the tier


class HostTierSpec(CPUOffloadingSpec):
    """vLLM's specification of a host tier, with copies that need no GPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            self._worker: OffloadingWorker = HostCopies(kv_caches, self.num_chunks)
        return self._worker


class HostCopies(OffloadingWorker):
    """Synchronous copies: a copy is done when the method that starts it returns."""

    def __init__(self, caches: CanonicalKVCaches, blocks: int) -> None:
        # One array [blocks, bytes] for each tensor. NumPy copies rows several times faster than
        # torch does.
        self._cache = [cache.tensor.numpy() for cache in caches.tensors]
        self._host = [np.empty((blocks, array.shape[1]), np.int8) for array in self._cache]
        # For each group, the tensors that have its layers. Groups may share tensors, not blocks.
        self._tensors = [
            sorted({layer.tensor_idx for layer in layers}) for layers in caches.group_data_refs
        ]
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        return self._move(job_id, self._places(src_spec, dst_spec), self._cache, self._host)

    def submit_load(
        self,
        job_id: int,
        src_spec: BlockIDsLoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        **_: object,
    ) -> bool:
        """Start a copy to the engine. vLLM 0.33 also passes whether it is urgent; all are."""
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
        """Yield for each tensor: its index, places in the cache, and places in the tier.

        Both specs list the blocks of all groups, one group after the other.
        """
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
        """Copy blocks; `places` yields a tensor, places in `source`, and places in `to`."""
        began_s, copied_bytes = time.perf_counter(), 0
        for tensor, (rows, targets) in places:
            copied_bytes += _copy(source[tensor], rows, to[tensor], targets)
        took_s = time.perf_counter() - began_s
        self._done.append(TransferResult(job_id, True, copied_bytes, took_s))
        return True


def _ids(spec: BlockIDsLoadStoreSpec) -> Sequence[int]:
    ids: list[int] = spec.block_ids.tolist()
    return ids


def _copy(source: Bytes, rows: Places, to: Bytes, places: Places) -> int:
    """Copy rows, and return the number of bytes."""
    for row, place in zip(rows, places, strict=True):
        to[place] = source[row]
    row_bytes: int = source.shape[1]
    return len(rows) * row_bytes
