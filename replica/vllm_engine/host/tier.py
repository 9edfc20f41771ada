"""The scheduler's part of the host tier, which vLLM's OffloadingConnector maintains.

The host tier is the part of the KV cache that is in host memory. vLLM decides which blocks are
copied to host memory and back, and when. This module adds three things: events with fingerprints,
eviction in kvroute's order, and a check that copying blocks back (a reload) is faster than
computing them.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
from kvroute.contract.keep import Order, RetentionHint
from kvroute.replica.engine.copy_speed import CopySpeed
from kvroute.replica.engine.reload_price import ReloadPrice
from kvroute.replica.fabric.block_format import format_of
from kvroute.replica.fabric.pull_speed import measured
from kvroute.replica.fabric.server import BlockPlace
from kvroute.replica.vllm_engine.blocks.division import Division
from kvroute.replica.vllm_engine.blocks.retention_hints import hint_of
from kvroute.replica.vllm_engine.host.claims import prefill_claim, reload_claim
from kvroute.replica.vllm_engine.host.connector import EndedRequest, HostTierConnector, Manager
from kvroute.replica.vllm_engine.host.events import HostEvents
from kvroute.replica.vllm_engine.host.meter import Meter
from kvroute.replica.vllm_engine.host.policy import RetentionPolicy
from kvroute.replica.vllm_engine.host.pull_orders import PullOrders
from kvroute.wire.tls import WireTls

if TYPE_CHECKING:
    from kvroute.replica.vllm_engine.host.disk import DiskTier
    from kvroute.replica.vllm_engine.host.peers import PeerTier

log = logging.getLogger("kvroute.replica")

DISK_OFF = "the disk cache is off: %s; choose another folder"


class OpenTiers(NamedTuple):
    """What a replica publishes about its slower tiers, besides their sizes."""

    format: str = ""  # Exchanging.format
    address: str = ""  # Exchanging.address
    # The measured speed of a pull of the replica from itself.
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0  # the measured speed of reads of the disk cache


def host_tier_of(connector: Any) -> "SchedulerHostTier | None":
    """Return the connector's host tier; None if the connector has none that kvroute configured."""
    if not isinstance(connector, OffloadingConnector):
        return None
    manager = connector.scheduler.manager
    policy = getattr(getattr(manager, "primary_tier", manager), "_policy", None)
    return SchedulerHostTier(connector, policy) if isinstance(policy, RetentionPolicy) else None


class SchedulerHostTier:
    """The host tier of one scheduler. Create it before the first request."""

    def __init__(self, connector: OffloadingConnector, policy: RetentionPolicy) -> None:
        self.meter = Meter(connector.scheduler)
        self._connector = connector
        self._policy = policy
        connector.__class__ = HostTierConnector
        connector.kvroute_meter = self.meter
        manager = connector.scheduler.manager
        # vLLM's manager of host memory. It is a part of another manager if the engine pulls.
        self._host = getattr(manager, "primary_tier", manager)
        if not isinstance(self._host, Manager):
            self._host.__class__ = Manager
        self._host.kvroute_on_stored = self.record_stored
        self._peers: PeerTier | None = _tier(manager, "PeerTier")
        self._disk: DiskTier | None = _tier(manager, "DiskTier")
        self._has_begun = False  # whether `open` was called

    def begin(self, space: Space, division: Division) -> Division:
        """Start to emit events with fingerprints, and to compare reloading with computing.

        Args:
            space: The properties of the model that its fingerprints depend on.
            division: How the engine divides its cache, without a host tier.

        Returns:
            The division with this tier's blocks.
        """
        self._space, scheduler = space, self._connector.scheduler
        hash_tokens, groups = scheduler.config.tokens_per_hash, len(division.groups)
        self._events = scheduler._events_tracker = HostEvents(groups, space, hash_tokens)
        with_tier = msgspec.structs.replace(
            division,
            host_blocks=self._policy.cache_capacity,
            host_block_bytes=_block_bytes(self._connector),
        )
        if tier := with_tier.host_tier(reload_claim()):
            copies, token_bytes = CopySpeed(tier.bytes_per_s), tier.block_bytes / division.unit
            self.meter.price = ReloadPrice(prefill_claim(), copies, token_bytes)
            self._host.kvroute_max_tokens = tier.blocks * division.unit
        if self._peers:
            self._connector.kvroute_pulls = PullOrders()
            self._peers.begin(self._events, scheduler.config.kv_group_configs)
        if self._disk:
            self._disk.begin(self._events, self.meter)
            self._connector.kvroute_disk = self._disk
            disk_blocks = self._disk.capacity_blocks
            with_tier = msgspec.structs.replace(with_tier, disk_blocks=disk_blocks)
        return with_tier

    def open(
        self, host: str, ports: Sequence[int], key: bytes, weights: str, tls: WireTls
    ) -> OpenTiers:
        """Open the slower tiers: serve blocks to other replicas, and read the disk cache.

        A problem with one of them switches it off, and nothing else. Call this before the first
        request. If the weights are not known then, call it again when they are; until then, only
        the speed of the disk is known.

        Args:
            host: The address on which to listen.
            ports: The ports to try.
            key: Pulls must prove to know this key.
            weights: Digest of the model's weights; empty: not known yet.
            tls: The replica's settings for TLS.
        """
        is_running, self._has_begun = self._has_begun, True
        opened = OpenTiers()
        if self._disk and not is_running:
            try:
                opened = opened._replace(disk_bytes_per_s=self._disk.measured())
            except OSError as error:
                log.warning(DISK_OFF, error)
                self._disk = None
        if not weights:
            return opened
        # Imported only here: if it does not fit the installed vLLM, these tiers are off.
        from kvroute.replica.vllm_engine.host.block_facts import block_facts

        if tier := self._peers or self._disk:
            row_bytes = tier.block_size_bytes
            facts = block_facts(self._connector, self._space, weights=weights, row_bytes=row_bytes)
            opened = opened._replace(format=format_of(facts))
        if self._disk:
            try:
                self._disk.open(opened.format, is_running=is_running)
            except OSError as error:
                log.warning(DISK_OFF, error)
                opened = opened._replace(disk_bytes_per_s=0.0)
        if self._peers and key:
            try:
                opened = self._serve(self._peers, opened, host, ports, key=key, tls=tls)
            except OSError as error:
                log.warning("pulls from other replicas are off: %s; check --replica-ports", error)
        return opened

    def _serve(
        self,
        peers: "PeerTier",
        opened: OpenTiers,
        host: str,
        ports: Sequence[int],
        *,
        key: bytes,
        tls: WireTls,
    ) -> OpenTiers:
        """Start to serve blocks. Raises OSError if no port is free, for example."""
        speed = measured(host, peers.block_size_bytes, tls)
        address = peers.serve(
            host, ports, key=key, format_=opened.format, find=self._place, tls=tls
        )
        return opened._replace(
            address=address, latency_s=speed.latency_s, bytes_per_s=speed.bytes_per_s
        )

    @property
    def has_slower_tiers(self) -> bool:
        """Return whether blocks can also come from other replicas or from a disk."""
        return self._peers is not None or self._disk is not None

    @property
    def has_pull_results(self) -> bool:
        """Return whether some pulls have ended whose results are not published yet."""
        pulls = self._connector.kvroute_pulls
        return pulls is not None and pulls.has_results

    def _place(self, key: OffloadKey) -> BlockPlace | None:
        """Return where a block is. Called in other threads, while the scheduler runs."""
        chunk = self._policy.get(key)
        return BlockPlace(chunk, chunk.chunk_id) if chunk is not None and chunk.is_ready else None

    def copies_of(self) -> list[dict[ExternalBlockHash, int]]:
        """Return, for each group, the number of blocks under each hash that can be reloaded."""
        chunks = self._policy.chunks.items()
        copies = self._events.copies_of(key for key, chunk in chunks if chunk.is_ready)
        return copies + self._events.copies_of(self._disk.keys()) if self._disk else copies

    def take_events(self) -> list[KVCacheEvent]:
        return list(self._connector.take_events())

    def clear(self) -> None:
        """Clear the tier without events.

        No event is needed, because the engine's memory is cleared at the same time, and one event
        reports both.

        vLLM cannot clear the tier twice between two steps: in the second call, it asserts that its
        workers already know of the copies that the first call stopped. To avoid this, the list of
        these copies is empty during the call, and restored after it.
        """
        scheduler = self._connector.scheduler
        stopped = scheduler._current_batch_jobs_to_flush
        scheduler._current_batch_jobs_to_flush = set()
        self._connector.reset_cache()
        scheduler._current_batch_jobs_to_flush |= stopped
        if self._disk:
            self._disk.clear()
        for _ in scheduler.manager.take_events():
            pass

    def pin(self, name: str, request: Request) -> None:
        """Pin the full blocks of the request's prompt. Some may not be copied to the tier yet."""
        if status := self._connector.scheduler._req_status.get(request.request_id):
            ends = status.req_context._offload_key_positions
            keys = (key for key, end in ends.items() if end <= request.num_prompt_tokens)
            self._policy.pin(name, sorted(keys, key=ends.__getitem__))

    def unpin(self, name: str) -> None:
        self._policy.pin(name, ())

    # Retention of blocks, as in class RetentionHints.

    def record_end(self, request: Request) -> None:
        """Record the end of a request, and set the retention of its blocks."""
        status = self._connector.scheduler._req_status.get(request.request_id)
        if status is None:
            return
        positions = status.req_context._offload_key_positions
        ended = EndedRequest(sorted(positions, key=positions.__getitem__), hint_of(request))
        status.req_context.set_state(ended)
        self.record_stored(ended)

    def record_stored(self, ended: EndedRequest) -> None:
        """Set the retention of an ended request's blocks, again after each copy to host memory."""
        self._policy.record_use(ended.keys, ended.hint)
        if self._disk:
            self._disk.record_use(ended.keys, ended.hint)

    def end(self, session: int) -> None:
        """End a session. The blocks that only it uses are then evicted first.

        This includes blocks that are not copied yet.
        """
        self._policy.end(session)
        if self._disk:
            self._disk.end(session)
        for status in self._connector.scheduler._req_status.values():
            ended = status.req_context.get_state(EndedRequest)
            if ended and ended.hint.session == session:
                ended.hint = RetentionHint(Order.ENDED, session)


def _tier(manager: Any, kind: str) -> Any:
    """Return the slower tier of this class; None if the engine has none.

    The classes are not imported here, because they need vLLM's tiering.
    """
    tiers = getattr(manager, "secondary_tiers", ())
    return next((tier for tier in tiers if type(tier).__name__ == kind), None)


def _block_bytes(connector: OffloadingConnector) -> int:
    """Return the size of a block: the sum of its parts in all workers, in bytes."""
    config = build_offloading_config(connector._vllm_config, connector._kv_cache_config)
    block_bytes: int = config.worker_kv_bytes_per_block * config.parallel.world_size
    return block_bytes
