"""A scheduler's side of a tier in host memory, which vLLM's OffloadingConnector keeps.

vLLM decides what is copied there and back, and when. Here it learns to tell of these blocks by
fingerprints, to drop them in our order, and to reload them only where that is cheaper.
"""

from typing import Any

import msgspec
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_utils import ExternalBlockHash
from vllm.v1.request import Request

from kvroute.blocks.chain import Space
from kvroute.contract.keep import Keep, Order
from kvroute.replica.engine.copy_speed import CopySpeed
from kvroute.replica.engine.reload_price import ReloadPrice
from kvroute.replica.vllm_engine.blocks.division import Division
from kvroute.replica.vllm_engine.blocks.keeping import said_of
from kvroute.replica.vllm_engine.host.claims import prefill_claim, reload_claim
from kvroute.replica.vllm_engine.host.connector import Connector, Ended, Manager
from kvroute.replica.vllm_engine.host.events import HostEvents
from kvroute.replica.vllm_engine.host.meter import Meter
from kvroute.replica.vllm_engine.host.policy import RetentionPolicy


def host_tier_of(connector: Any) -> "HostTier | None":
    """None: the connector keeps none, or one that is not ours."""
    if not isinstance(connector, OffloadingConnector):
        return None
    policy = getattr(connector.scheduler.manager, "_policy", None)
    return HostTier(connector, policy) if isinstance(policy, RetentionPolicy) else None


class HostTier:
    """Of one scheduler, from before its first request on."""

    def __init__(self, connector: OffloadingConnector, policy: RetentionPolicy) -> None:
        self.meter = Meter(connector.scheduler)
        self._connector = connector
        self._policy = policy
        connector.__class__ = Connector
        connector.kvroute_meter = self.meter
        connector.scheduler.manager.__class__ = Manager
        connector.scheduler.manager.kvroute_stored = self.stored

    def begin(self, space: Space, division: Division) -> Division:
        """From now on its events have fingerprints, and reloads have a price. Returns the division
        with this tier."""
        scheduler = self._connector.scheduler
        hash_tokens, groups = scheduler.config.tokens_per_hash, len(division.groups)
        self._events = scheduler._events_tracker = HostEvents(groups, space, hash_tokens)
        whole = msgspec.structs.replace(
            division,
            host_blocks=self._policy.cache_capacity,
            host_block_bytes=_block_bytes(self._connector),
        )
        if tier := whole.host_tier(reload_claim()):
            copies, token_bytes = CopySpeed(tier.bytes_per_s), tier.block_bytes / division.unit
            self.meter.price = ReloadPrice(prefill_claim(), copies, token_bytes)
            scheduler.manager.kvroute_most_tokens = tier.blocks * division.unit
        return whole

    def copies_of(self) -> list[dict[ExternalBlockHash, int]]:
        """For each group, the blocks that can be reloaded."""
        chunks = self._policy.chunks.items()
        return self._events.copies_of(key for key, chunk in chunks if chunk.is_ready)

    def take_events(self) -> list[KVCacheEvent]:
        return list(self._connector.take_events())

    def clear(self) -> None:
        """Nothing is kept; and nothing is to be told of what was, as the engine's own memory is
        empty too. vLLM cannot clear twice between two steps: it asserts that it has told its
        workers of the copies that the first time has stopped."""
        scheduler = self._connector.scheduler
        stopped = scheduler._current_batch_jobs_to_flush
        scheduler._current_batch_jobs_to_flush = set()
        self._connector.reset_cache()
        scheduler._current_batch_jobs_to_flush |= stopped
        for _ in scheduler.manager.take_events():
            pass

    def pin(self, name: str, request: Request) -> None:
        """The full blocks of its prompt stay; the tier may still have to copy some."""
        if status := self._connector.scheduler._req_status.get(request.request_id):
            ends = status.req_context._offload_key_positions
            keys = (key for key, end in ends.items() if end <= request.num_prompt_tokens)
            self._policy.pin(name, sorted(keys, key=ends.__getitem__))

    def unpin(self, name: str) -> None:
        self._policy.pin(name, ())

    # What requests say of their blocks, as in Keeping.

    def ended(self, request: Request) -> None:
        """Its blocks were used until now."""
        status = self._connector.scheduler._req_status.get(request.request_id)
        if status is None:
            return
        positions = status.req_context._offload_key_positions
        ended = Ended(sorted(positions, key=positions.__getitem__), said_of(request))
        status.req_context.set_state(ended)
        self._policy.used(ended.keys, ended.keep)

    def stored(self, ended: Ended) -> None:
        """Some copies were made after their request's end. What was said meanwhile holds."""
        self._policy.used(ended.keys, ended.keep)

    def end(self, session: int) -> None:
        """Also of what its requests still copy."""
        self._policy.end(session)
        for status in self._connector.scheduler._req_status.values():
            ended = status.req_context.get_state(Ended)
            if ended and ended.keep.session == session:
                ended.keep = Keep(Order.ENDED, session)


def _block_bytes(connector: OffloadingConnector) -> int:
    """Of all workers together."""
    config = build_offloading_config(connector._vllm_config, connector._kv_cache_config)
    block_bytes: int = config.worker_kv_bytes_per_block * config.parallel.world_size
    return block_bytes
