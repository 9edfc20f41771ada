"""The scheduler's part of the host tier that vLLM's OffloadingConnector maintains.

vLLM decides which blocks are copied to host memory and back, and when. This module adds events with
fingerprints, eviction in kvroute's order, and reloads only where they are faster than computing.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_utils import ExternalBlockHash
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.request import Request

from kvroute.blocks.chain import Space
from kvroute.contract.keep import KEEP, Keep, over
from kvroute.replica.engine.copy_speed import CopySpeed
from kvroute.replica.engine.reload_price import ReloadPrice
from kvroute.replica.vllm_engine.blocks.division import Division
from kvroute.replica.vllm_engine.blocks.keeping import RECENT, keep_of, name_of
from kvroute.replica.vllm_engine.host.claims import prefill_claim, reload_claim
from kvroute.replica.vllm_engine.host.connector import Connector, Ended, Manager
from kvroute.replica.vllm_engine.host.events import HostEvents
from kvroute.replica.vllm_engine.host.meter import Meter
from kvroute.replica.vllm_engine.host.policy import RetentionPolicy


def host_tier_of(connector: Any) -> "HostTier | None":
    """Return the connector's host tier, or None if it has none or one that kvroute did not make."""
    if not isinstance(connector, OffloadingConnector):
        return None
    policy = getattr(connector.scheduler.manager, "_policy", None)
    return HostTier(connector, policy) if isinstance(policy, RetentionPolicy) else None


class HostTier:
    """The host tier of one scheduler; made before the first request."""

    def __init__(self, connector: OffloadingConnector, policy: RetentionPolicy) -> None:
        self.meter = Meter(connector.scheduler)
        self._connector = connector
        self._policy = policy
        self._has_hints = False  # True once a request had another hint than the default
        self._recent: OrderedDict[str, list[Ended]] = OrderedDict()
        connector.__class__ = Connector
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
        self._recent.clear()
        self._has_hints = False

    def pin(self, name: str, request: Request) -> None:
        """Pin the full blocks of the request's prompt; some may still have to be copied."""
        if status := self._connector.scheduler._req_status.get(request.request_id):
            ends = status.req_context._offload_key_positions
            keys = (key for key, end in ends.items() if end <= request.num_prompt_tokens)
            self._policy.pin(name, sorted(keys, key=ends.__getitem__))

    def unpin(self, name: str) -> None:
        self._policy.pin(name, ())

    # Retention hints of requests, as in Keeping.

    def ended(self, request: Request) -> None:
        """Record that a request used its blocks until now, and set their retention."""
        status = self._connector.scheduler._req_status.get(request.request_id)
        if status is None:
            return
        positions, keep = status.req_context._offload_key_positions, keep_of(request)
        ended = Ended(sorted(positions, key=positions.__getitem__), keep)
        status.req_context.set_state(ended)
        self._has_hints = self._has_hints or keep != KEEP
        self._policy.used(ended.keys, keep if self._has_hints else None)
        if (name := name_of(request, keep)) is not None:
            self._remember(name, ended)

    def stored(self, keys: Sequence[OffloadKey], ended: Ended) -> None:
        """Set the retention of blocks whose copies were made after their request's end."""
        self._label(keys, ended.keep)
        self._policy.used(ended.keys)

    def label_again(self, name: str, keep: Keep) -> None:
        for ended in self._recent.pop(name, ()):
            ended.keep = keep
            self._label(ended.keys, keep)

    def end(self, session: int) -> None:
        """End a session: its blocks are evicted first, also those that are still being copied."""
        self._policy.end(session)
        for status in self._connector.scheduler._req_status.values():
            ended = status.req_context.get_state(Ended)
            if ended and ended.keep.session == session:
                ended.keep = over(session)

    def _label(self, keys: Sequence[OffloadKey], keep: Keep) -> None:
        if self._has_hints:  # otherwise all blocks have the default
            self._policy.label(keys, keep)

    def _remember(self, name: str, ended: Ended) -> None:
        """Keep the blocks for `label_again`; all choices of a request have the same name."""
        self._recent.setdefault(name, []).append(ended)
        self._recent.move_to_end(name)
        while len(self._recent) > RECENT or self._recent_blocks > self._policy.cache_capacity:
            self._recent.popitem(last=False)

    @property
    def _recent_blocks(self) -> int:
        return sum(len(ended.keys) for choices in self._recent.values() for ended in choices)


def _block_bytes(connector: OffloadingConnector) -> int:
    """Return the size of a block of all workers together."""
    config = build_offloading_config(connector._vllm_config, connector._kv_cache_config)
    block_bytes: int = config.worker_kv_bytes_per_block * config.parallel.world_size
    return block_bytes
