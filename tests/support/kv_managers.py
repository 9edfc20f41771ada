"""vLLM's own managers of a KV cache, without a model. Importing this imports vLLM.

cache = Cache(full(16), window(16, tokens=40), state(32))
cache.run(range(100))  # run a request; returns the number of tokens of its cache hit
events = cache.events()  # events since the last call
cache.hit(range(80))  # number of tokens of the cache hit, without running the request
"""

import itertools
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvroute.blocks.chain import Space
from kvroute.replica.engine.kv_events import KVEvent
from kvroute.replica.vllm_engine.blocks.division import Division, division_of
from kvroute.replica.vllm_engine.blocks.events import EventBatch, event_of
from kvroute.replica.vllm_engine.blocks.pool import copies_of, fingerprint
from kvroute.replica.vllm_engine.replaced import IN_ENGINE, apply

apply(IN_ENGINE)

MODEL = "m"
HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def full(block_tokens: int) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_tokens, **HEADS)


def window(block_tokens: int, tokens: int) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=block_tokens, sliding_window=tokens, **HEADS)


def chunk(block_tokens: int, tokens: int) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(block_size=block_tokens, attention_chunk_size=tokens, **HEADS)


def state(block_tokens: int, mode: str = "align") -> KVCacheSpec:
    return MambaSpec(
        block_size=block_tokens,
        shapes=((8,),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
    )


class Cache:
    """A KV cache with these groups and `blocks` blocks, and its events.

    `unit` is the number of tokens of one fingerprint, and `step_tokens` the maximum number of
    tokens of a request that a step computes. `hash_tokens` is vLLM's option prefix_match_unit.
    """

    def __init__(
        self,
        *specs: KVCacheSpec,
        blocks: int = 100,
        unit: int = 16,
        step_tokens: int = 10_000,
        hash_tokens: int | None = None,
        max_model_len: int = 10_000,
    ) -> None:
        init_none_hash(sha256_cbor)
        groups = [KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(specs)]
        config = KVCacheConfig(blocks + 1, [], groups)  # one is vLLM's null block
        step_size, hash_size = resolve_kv_cache_block_sizes(config, _options(specs, hash_tokens))
        self.manager = KVCacheManager(
            config,
            max_model_len=max_model_len,
            scheduler_block_size=step_size,
            hash_block_size=hash_size,
            enable_kv_cache_events=True,
        )
        self.unit = unit
        self.pool = self.manager.block_pool
        fingerprint(self.pool, Space(MODEL, "", unit))
        self._hasher = get_request_block_hasher(hash_size, sha256_cbor)
        self._step_tokens = step_tokens
        self._split = _splitter(self.manager, specs, step_tokens, step_size, hash_size)
        self._numbers = itertools.count()

    @property
    def division(self) -> Division:
        return division_of(self.manager, self.unit)

    def request(
        self, token_ids: Iterable[int], namespace: str = "", lora: str = "", **own: Any
    ) -> Request:
        return Request(
            f"r{next(self._numbers)}",
            list(token_ids),
            SamplingParams(max_tokens=1),
            None,
            lora_request=LoRARequest(lora, 1, f"/{lora}") if lora else None,
            cache_salt=namespace or None,
            block_hasher=self._hasher,
            **own,
        )

    def run(self, prompt: Iterable[int] | Request, answer: Iterable[int] = (), **own: Any) -> int:
        """Compute a prompt and its answer, then free the request's blocks.

        Returns the number of tokens of the cache hit. Raises MemoryError if there are too few
        blocks.
        """
        request = prompt if isinstance(prompt, Request) else self.request(prompt, **own)
        try:
            hit = self.begin(request)
            for token in answer:
                request.append_output_token_ids(token)
                self._step(request, 1)
        finally:
            self.free(request)
        return hit

    def begin(self, request: Request) -> int:
        """Compute a request's prompt and hold its blocks; return the tokens of its cache hit."""
        hit: int
        hit_blocks, hit, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        self._step(request, request.num_tokens - hit, hit, hit_blocks)
        while request.num_computed_tokens < request.num_tokens:
            self._step(request, request.num_tokens - request.num_computed_tokens)
        return hit

    def free(self, request: Request) -> None:
        self.manager.free(request)

    def hit(self, token_ids: Iterable[int], **own: Any) -> int:
        """Return the number of tokens of the cache hit that this prompt would have."""
        request = self.request(token_ids, **own)
        _, tokens, _ = self.manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        return int(tokens)

    def held(self) -> list[dict[Any, int]]:
        """Return the number of cached blocks with each hash, for each group."""
        return copies_of([self.pool], len(self.manager.kv_cache_config.kv_cache_groups))

    def events(self) -> list[KVEvent]:
        """Return the events since the last call, encoded and decoded in vLLM's wire format."""
        packed = msgspec.msgpack.encode(EventBatch(ts=0.0, events=self.manager.take_events()))
        batch = msgspec.msgpack.decode(packed, type=EventBatch)
        return [event for sent in batch.events if (event := event_of(sent)) is not None]

    def _step(self, request: Request, tokens: int, hit: int = 0, hit_blocks: Any = None) -> None:
        self.manager.new_step_starts()
        tokens = self._split(request, min(tokens, self._step_tokens), hit)
        blocks = self.manager.allocate_slots(request, tokens, hit, hit_blocks)
        _, copied = self.manager.take_kv_cache_block_copies()
        self.pool.free_blocks(copied)
        if blocks is None:
            raise MemoryError
        request.num_computed_tokens += hit + tokens


def _options(specs: Sequence[KVCacheSpec], hash_tokens: int | None) -> Any:
    """Return the parts of VllmConfig that determine block sizes."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=specs[0].block_size,
            prefix_match_unit=hash_tokens,
            enable_prefix_caching=True,
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        kv_transfer_config=None,
    )


def _splitter(
    manager: KVCacheManager,
    specs: Sequence[KVCacheSpec],
    step_tokens: int,
    step_size: int,
    hash_size: int,
) -> Any:
    """Return a function that limits a step's tokens as vLLM's scheduler does.

    If the model has states (as Mamba), a step ends where a state is to be cached.
    """
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    if not any(spec.mamba_cache_mode == "align" for spec in states):
        return lambda request, tokens, hit: tokens
    scheduler = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=states[0].block_size),
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        max_num_scheduled_tokens=step_tokens,
        block_size=step_size,
        hash_block_size=hash_size,
        use_eagle_block_drop=False,
        mamba_has_prefill_checkpoint_blocks=False,
        mamba_prefill_checkpoint_alignment=None,
        mamba_partial_cache_hit=(
            hash_size < step_size and manager.coordinator.enable_partial_hash_hits
        ),
        mamba_shared_prefix_checkpoint=False,
    )
    return lambda request, tokens, hit: Scheduler._mamba_block_aligned_split(
        scheduler, request, tokens, hit
    )
