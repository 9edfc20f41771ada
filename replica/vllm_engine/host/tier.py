"""The scheduler's part of the host tier that vLLM's OffloadingConnector maintains.

vLLM decides which blocks are copied to host memory and back, and when. This module adds events with
fingerprints, eviction in kvroute's order, and reloads only where they are faster than computing.
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
from kvroute.contract.keep import Order, RetentionHint
from kvroute.replica.engine.copy_speed import CopySpeed
from kvroute.replica.engine.reload_price import ReloadPrice
from kvroute.replica.vllm_engine.blocks.division import Division
from kvroute.replica.vllm_engine.blocks.retention_hints import hint_of
from kvroute.replica.vllm_engine.host.claims import prefill_claim, reload_claim
from kvroute.replica.vllm_engine.host.connector import EndedRequest, HostTierConnector, Manager
from kvroute.replica.vllm_engine.host.events import HostEvents
from kvroute.replica.vllm_engine.host.meter import Meter
from kvroute.replica.vllm_engine.host.policy import RetentionPolicy


def host_tier_of(connector: Any) -> "SchedulerHostTier | None":
    """Return the connector's host tier, or None if it has none or one that kvroute did not make."""
    if not isinstance(connector, OffloadingConnector):
        return None
    policy = getattr(connector.scheduler.manager, "_policy", None)
    return SchedulerHostTier(connector, policy) if isinstance(policy, RetentionPolicy) else None


class SchedulerHostTier:
    """The host tier of one scheduler; made before the first request."""

    def __init__(self, connector: OffloadingConnector, policy: RetentionPolicy) -> None:
        self.meter = Meter(connector.scheduler)
        self._connector = connector
        self._policy = policy
        connector.__class__ = HostTierConnector
        connector.kvroute_meter = self.meter
        connector.scheduler.manager.__class__ = Manager
        connector.scheduler.manager.kvroute_stored = self.stored

    def begin(self, space: Space, division: Division) -> Division:
        """Start events with fingerprints and prices of reloads.

        Returns the division with this tier.
        """
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
        """Return, for each group, the number of blocks that can be reloaded under each hash."""
        chunks = self._policy.chunks.items()
        return self._events.copies_of(key for key, chunk in chunks if chunk.is_ready)

    def take_events(self) -> list[KVCacheEvent]:
        return list(self._connector.take_events())

    def clear(self) -> None:
        """Clear the tier without events: the engine's memory is cleared too, with one event.

        vLLM cannot clear the tier twice between two steps: it asserts that its workers have been
        informed of the copies that the first call stopped. So the list of these copies is empty
        during the second call.
        """
        scheduler = self._connector.scheduler
        stopped = scheduler._current_batch_jobs_to_flush
        scheduler._current_batch_jobs_to_flush = set()
        self._connector.reset_cache()
        scheduler._current_batch_jobs_to_flush |= stopped
        for _ in scheduler.manager.take_events():
            pass

    def pin(self, name: str, request: Request) -> None:
        """Pin the full blocks of the request's prompt; some may still have to be copied."""
        if status := self._connector.scheduler._req_status.get(request.request_id):
            ends = status.req_context._offload_key_positions
            keys = (key for key, end in ends.items() if end <= request.num_prompt_tokens)
            self._policy.pin(name, sorted(keys, key=ends.__getitem__))

    def unpin(self, name: str) -> None:
        self._policy.pin(name, ())

    # Retention hints of requests, as in RetentionHints.

    def ended(self, request: Request) -> None:
        """Record that a request used its blocks until now, and set their retention."""
        status = self._connector.scheduler._req_status.get(request.request_id)
        if status is None:
            return
        positions = status.req_context._offload_key_positions
        ended = EndedRequest(sorted(positions, key=positions.__getitem__), hint_of(request))
        status.req_context.set_state(ended)
        self._policy.used(ended.keys, ended.keep)

    def stored(self, ended: EndedRequest) -> None:
        """Set the retention of blocks whose copies were made after their request's end."""
        self._policy.used(ended.keys, ended.keep)

    def end(self, session: int) -> None:
        """End a session: its blocks are evicted first, also those that are still being copied."""
        self._policy.end(session)
        for status in self._connector.scheduler._req_status.values():
            ended = status.req_context.get_state(EndedRequest)
            if ended and ended.keep.session == session:
                ended.keep = RetentionHint(Order.ENDED, session)


def _block_bytes(connector: OffloadingConnector) -> int:
    """Return the size of a block of all workers together."""
    config = build_offloading_config(connector._vllm_config, connector._kv_cache_config)
    block_bytes: int = config.worker_kv_bytes_per_block * config.parallel.world_size
    return block_bytes
