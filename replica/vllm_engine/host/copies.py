"""Copies blocks between the KV cache of vLLM's CPU backend and a host tier.

vLLM's own code for copies needs a GPU. vLLM loads HostTierSpec by name in each process of the
engine, unless other replicas can pull from the tier (host/spec.py).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
Rows = Sequence[int]  # indices of blocks in the cache or in the tier


class HostTierSpec(CPUOffloadingSpec):
    """vLLM's specification of a host tier, changed to use a worker that needs no GPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            self._worker: OffloadingWorker = HostCopies(
                kv_caches, lambda row_bytes: np.empty((self.num_chunks, row_bytes), np.int8)
            )
        return self._worker


class HostCopies(OffloadingWorker):
    """Makes copies synchronously: a copy has ended when the method that starts it returns."""

    def __init__(
        self,
        caches: CanonicalKVCaches,
        allocate: Callable[[int], Bytes],
        release: Callable[[], None] | None = None,
    ) -> None:
        """Create a worker.

        Args:
            caches: vLLM's KV cache.
            allocate: Returns the host memory for one of the cache's tensors, an array of shape
                [blocks, bytes]; called with the bytes of one block.
            release: Called at the end, when nothing refers to these arrays; None: they need no
                release.
        """
        # For each tensor, an array of shape [blocks, bytes]. NumPy copies rows several times faster
        # than torch does.
        self._cache = [cache.tensor.numpy() for cache in caches.tensors]
        self._host = [allocate(array.shape[1]) for array in self._cache]
        self._release = release
        # For each group, the indices of the tensors with its layers. Groups may share tensors, but
        # not blocks.
        self._tensors = [
            sorted({layer.tensor_idx for layer in layers}) for layers in caches.group_data_refs
        ]
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        return self._copy_all(job_id, self._rows(src_spec, dst_spec), self._cache, self._host)

    def submit_load(
        self,
        job_id: int,
        src_spec: BlockIDsLoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        **_: object,
    ) -> bool:
        """Copy blocks to the engine. vLLM 0.33 also passes whether that is urgent; ignore this."""
        rows = ((tensor, pair[::-1]) for tensor, pair in self._rows(dst_spec, src_spec))
        return self._copy_all(job_id, rows, self._host, self._cache)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        if self._release is not None:
            self._host.clear()
            self._release()

    def _rows(
        self, cache_spec: GPULoadStoreSpec, tier_spec: BlockIDsLoadStoreSpec
    ) -> Iterator[tuple[int, tuple[Rows, Rows]]]:
        """Yield, for each tensor, its index, its rows in the cache, and its rows in the tier.

        The block ids in both specs are sorted by group: those of the first group come first.
        """
        pairs = zip(_ids(cache_spec), _ids(tier_spec), strict=True)
        for tensors, blocks in zip(self._tensors, cache_spec.group_sizes, strict=True):
            if group_pairs := list(islice(pairs, blocks)):
                cache_rows, tier_rows = zip(*group_pairs, strict=True)
                yield from ((tensor, (cache_rows, tier_rows)) for tensor in tensors)

    def _copy_all(
        self,
        job_id: int,
        rows: Iterable[tuple[int, tuple[Rows, Rows]]],
        source: Sequence[Bytes],
        target: Sequence[Bytes],
    ) -> bool:
        """Copy blocks, and record the copy's size and time.

        Args:
            job_id: vLLM's number of the copy.
            rows: Yields a tensor's index, rows in `source`, and rows in `target`.
            source: The arrays to copy from.
            target: The arrays to copy to.
        """
        began_s, copied_bytes = time.perf_counter(), 0
        for tensor, (source_rows, target_rows) in rows:
            copied_bytes += _copy(source[tensor], source_rows, target[tensor], target_rows)
        took_s = time.perf_counter() - began_s
        self._done.append(TransferResult(job_id, True, copied_bytes, took_s))
        return True


def _ids(spec: BlockIDsLoadStoreSpec) -> Sequence[int]:
    ids: list[int] = spec.block_ids.tolist()
    return ids


def _copy(source: Bytes, source_rows: Rows, target: Bytes, target_rows: Rows) -> int:
    """Copy rows, and return the number of bytes."""
    for source_row, target_row in zip(source_rows, target_rows, strict=True):
        target[target_row] = source[source_row]
    row_bytes: int = source.shape[1]
    return len(source_rows) * row_bytes
