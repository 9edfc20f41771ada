"""vLLM's schedulers with eleven additions.

1. Events about blocks have fingerprints.
2. When the cache is cleared, the event about it is published at once.
3. The cached blocks can be listed.
4. Blocks can be pinned: they are not evicted until they are unpinned.
5. Blocks are evicted in kvroute's order (blocks/retention_hints.py).
6. A tier in host memory evicts in the same order and publishes its blocks, too (host/tier.py).
7. A preempted request leaves no uncomputed blocks in the cache.
8. If another engine began a response, its grammar continues after the tokens generated so far.
9. The engine's process ends when its replica ends.
10. Batch requests give way to other requests in each step (lane.py).
11. Features limit the prompt tokens of each step (step_limits.py).

vLLM loads these classes by name in the engine's process. They use private API of the pinned
version. tests/slow/engines/test_engine.py checks the behaviour that they rely on.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed import kv_events
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from kvroute.blocks.chain import Space
from kvroute.features.engine_sides import engine_features
from kvroute.replica.vllm_engine.blocks.division import Division, division_of
from kvroute.replica.vllm_engine.blocks.events import CachedBlocks, EventBatch
from kvroute.replica.vllm_engine.blocks.pool import copies_of, fingerprint
from kvroute.replica.vllm_engine.blocks.retention_hints import RetentionHints
from kvroute.replica.vllm_engine.core.lane import BatchLane
from kvroute.replica.vllm_engine.core.lora_fit import fit_of, misfit
from kvroute.replica.vllm_engine.core.step_limits import StepLimits
from kvroute.replica.vllm_engine.grammar.backends import Grammars
from kvroute.replica.vllm_engine.optional_parts import BATCH_LANE, GRAMMARS, STEP_LIMITS, is_on
from kvroute.replica.vllm_engine.process.die_with_parent import die_with_parent
from kvroute.replica.vllm_engine.process.quick_end import end_quickly
from kvroute.replica.vllm_engine.replaced import IN_ENGINE, apply
from kvroute.wire.tls import WireTls

if TYPE_CHECKING:
    from kvroute.replica.vllm_engine.host.tier import SchedulerHostTier

# Keys in the extra_args of SamplingParams. When the request ends, its prompt's blocks in the
# engine's memory (PIN) or in host memory (HOST_PIN) are pinned. The value is the pin's name.
PIN, HOST_PIN = "kvroute_pin", "kvroute_host_pin"


@dataclass(frozen=True)
class _Pin:
    """A pin: it adds a reference to each of its blocks, as a running request does."""

    tokens: int  # number of the prompt's tokens whose blocks are pinned
    blocks: list[tuple[BlockPool, list[KVCacheBlock]]]  # one item for each KV cache group

    def hold(self) -> None:
        for pool, blocks in self.blocks:
            pool.touch(blocks)

    def release(self) -> None:
        for pool, blocks in self.blocks:
            pool.free_blocks(reversed(blocks))


def _without_null(blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
    """Return the real blocks. A group has null blocks in place of blocks that it does not need."""
    return [block for block in blocks if not block.is_null]


class _Kvroute:
    """The additions to vLLM's schedulers, as a mixin class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if is_on(GRAMMARS):
            Grammars.take_over(self.structured_output_manager)  # type: ignore[attr-defined]
        self.pins: dict[str, _Pin] = {}
        # None: vLLM schedules batch requests like others, in its order of priorities.
        self.lane = BatchLane(self) if is_on(BATCH_LANE) else None
        # None: no feature limits steps.
        self.step_limits = None
        if is_on(STEP_LIMITS) and (features := engine_features(os.environ)).has_any:
            self.step_limits = StepLimits(self, features)
        self.retention_hints = RetentionHints(self.kv_cache_manager, self._pools)  # type: ignore[attr-defined]
        self.host = self._host_tier()  # None: there is no host tier
        die_with_parent()
        if self.host and self.host.has_slower_tiers:
            end_quickly()

    def begin(self, space: Space) -> Division:
        """Make events have fingerprints from now on, and return how the cache is divided.

        Call this before the first request.
        """
        for pool in self._pools:
            fingerprint(pool, space)
        division = division_of(self.kv_cache_manager, space.block_size)  # type: ignore[attr-defined]
        return self.host.begin(space, division) if self.host else division

    def _host_tier(self) -> "SchedulerHostTier | None":
        connector = self.connector  # type: ignore[attr-defined]
        if connector is None:
            return None
        # Imported late, because it imports vLLM's connector.
        from kvroute.replica.vllm_engine.host.tier import host_tier_of

        return host_tier_of(connector)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan the next step, within the limits of lane and features; call vLLM's method."""
        if self.lane is not None:
            self.lane.begin_step()
        if self.step_limits is not None:
            self.step_limits.begin_step()
        planned = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if self.lane is not None:
            self.lane.end_step(planned)
        if self.step_limits is not None:
            self.step_limits.end_plan(planned)
        if self.host and self.host.has_pull_results:
            self._publish_events()  # they arrive before the first token
        return planned

    def _reserve_prefill_lookahead(self, *args: Any, **kwargs: Any) -> int:
        """Return how many tokens a request gets in this step, as vLLM, lane and features say."""
        tokens: int = super()._reserve_prefill_lookahead(*args, **kwargs)  # type: ignore[misc]
        request, num_computed_tokens, *_ = args
        if self.lane is not None:
            tokens = self.lane.tokens(request, num_computed_tokens, tokens)
        if self.step_limits is not None:
            tokens = self.step_limits.tokens(request, num_computed_tokens, tokens)
        return tokens

    def _free_blocks(self, request: Request) -> None:
        """Pin a request's blocks and set their retention, before they are freed.

        vLLM calls this when a request ends, but not when it is preempted.
        """
        params = request.sampling_params
        extra = (params and params.extra_args) or {}
        if request.status != RequestStatus.FINISHED_ABORTED:
            if name := extra.get(PIN):
                self._pin(name, request)
            if self.host and (name := extra.get(HOST_PIN)):
                self.host.pin(name, request)
        self.retention_hints.label(request)
        if self.host:
            self.host.record_end(request)
        super()._free_blocks(request)  # type: ignore[misc]

    def end_session(self, session: int) -> None:
        self.retention_hints.end(session, self.requests.values())  # type: ignore[attr-defined]
        if self.host:
            self.host.end(session)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Remove the request's uncomputed blocks from the cache before it is preempted.

        vLLM adds blocks to the cache when it schedules their computation. With priorities, it can
        preempt a request that it has already scheduled in the same step. The request's new blocks
        are then never computed.
        """
        for manager in self._managers:
            blocks = manager.req_to_blocks.get(request.request_id, [])
            uncomputed = blocks[request.num_computed_tokens // manager.block_size :]
            manager.block_pool.evict_blocks({block.block_id for block in _without_null(uncomputed)})
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _pin(self, name: str, request: Request) -> None:
        """Pin the cached blocks that a longer prompt with this prompt as its prefix needs.

        These are all blocks of full attention, the last blocks of sliding windows, and the last
        state of state-space layers. They replace the blocks of an earlier pin with this name.
        """
        coordinator = self.kv_cache_manager.coordinator  # type: ignore[attr-defined]
        hits, tokens, _ = coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_prompt_tokens
        )
        groups = zip(coordinator.single_type_managers, hits, strict=True)
        pin = _Pin(
            tokens, [(manager.block_pool, _without_null(blocks)) for manager, blocks in groups]
        )
        pin.hold()
        self.unpin(name)
        self.pins[name] = pin

    def unpin(self, name: str) -> None:
        if pin := self.pins.pop(name, None):
            pin.release()
        if self.host:
            self.host.unpin(name)

    @property
    def _managers(self) -> Sequence[SingleTypeKVCacheManager]:
        managers: Sequence[SingleTypeKVCacheManager]
        managers = self.kv_cache_manager.coordinator.single_type_managers  # type: ignore[attr-defined]
        return managers

    @property
    def _pools(self) -> list[BlockPool]:
        """Return all block pools. With some models, some groups have a pool in host memory."""
        return list(dict.fromkeys(manager.block_pool for manager in self._managers))

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Clear the cache and its pins, and publish AllBlocksCleared at once.

        vLLM itself would publish it in the next step, but an idle engine runs no step.
        """
        pins = dict(self.pins)
        for name in pins:
            self.unpin(name)
        done: bool = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        if done:
            self.retention_hints.clear()
            if self.host:
                self.host.clear()
        else:
            for pin in pins.values():
                pin.hold()
            self.pins = pins
        self._publish_events()
        return done

    def reset_connector_cache(self) -> bool:
        """Do nothing if there is a host tier, because reset_prefix_cache clears it."""
        done: bool = self.host is not None or super().reset_connector_cache()  # type: ignore[misc]
        return done

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the step's end to measure times; call vLLM's method."""
        if self.step_limits is not None:
            self.step_limits.end_step(scheduler_output)
        if self.host:
            self.host.meter.record_step_end(scheduler_output)
        return super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def emit_held(self) -> None:
        """Publish a list of all cached blocks.

        This stops the engine for about 0.5 ms per 1,000 blocks.
        """
        groups = len(self.kv_cache_config.kv_cache_groups)  # type: ignore[attr-defined]
        copies = copies_of(self._pools, groups)
        if self.host:
            copies += self.host.copies_of()
        self._publish_events(CachedBlocks(copies))

    def _publish_events(self, *more: kv_events.KVCacheEvent) -> None:
        """Publish the pending events now, followed by `more`."""
        host_events = self.host.take_events() if self.host else ()
        events = [*self.kv_cache_manager.take_events(), *host_events, *more]  # type: ignore[attr-defined]
        if events:
            self.kv_event_publisher.publish(  # type: ignore[attr-defined]
                EventBatch(ts=time.time(), events=events)
            )


class KvrouteScheduler(_Kvroute, Scheduler):
    """The scheduler on CPUs. There, vLLM schedules a step after the previous one has ended."""


class KvrouteAsyncScheduler(_Kvroute, AsyncScheduler):
    """The scheduler on GPUs. There, vLLM schedules a step while the previous one runs."""


# Methods that are added to EngineCore. vLLM's client calls them by name in the engine's process.


def kvroute_emit_held(core: EngineCore) -> None:
    core.scheduler.emit_held()


def kvroute_begin(core: EngineCore, model: str, revision: str, block_size: int) -> dict[str, Any]:
    """Make events have fingerprints from now on; return the Division as plain values."""
    division: Division = core.scheduler.begin(Space(model, revision, block_size))
    core.mm_receiver_cache = None  # each request contains its images (http/media.py)
    plain: dict[str, Any] = msgspec.to_builtins(division)
    return plain


def kvroute_open_tiers(
    core: EngineCore, host: str, ports: list[int], key: bytes, weights: str, tls: list[Any]
) -> dict[str, Any]:
    """Open the tiers behind host memory (host/tier.py); return an OpenTiers as plain values.

    `tls` has the values of a WireTls.
    """
    if (tier := core.scheduler.host) is None:
        return {}
    opened = tier.open(host, ports, key, weights, WireTls(*tls))
    core.scheduler._publish_events()  # the blocks on the disk
    plain: dict[str, Any] = opened._asdict()
    return plain


def kvroute_misfit(core: EngineCore, lora_id: int) -> str:
    """Return why a loaded LoRA adapter does not fit the model; empty: it fits."""
    served = core.vllm_config.model_config.served_model_name
    name: str = served[0] if isinstance(served, list) else served
    return misfit(core.collective_rpc(fit_of, args=(lora_id,)), name)


def kvroute_pinned(core: EngineCore, name: str) -> int:
    """Return the number of prompt tokens that the pin holds; 0 if there is no such pin."""
    pin: _Pin | None = core.scheduler.pins.get(name)
    return pin.tokens if pin else 0


def kvroute_end_session(core: EngineCore, session: int) -> None:
    core.scheduler.end_session(session)


def kvroute_unstarted(core: EngineCore, request_ids: list[str]) -> list[str]:
    """Return those of these requests that wait in vLLM's queue for blocks or a place in the batch.

    Requests that wait for a grammar or for copies of blocks are not among them, and neither are
    those of which vLLM computes one of several choices. vLLM's ids contain the ids of requests: it
    adds a suffix, and a prefix for each choice.
    """
    waiting, begun = list[str](), list[str]()
    for request in core.scheduler.requests.values():
        is_waiting = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        is_unstarted = is_waiting and not request.num_output_tokens
        (waiting if is_unstarted else begun).append(request.request_id)

    def is_in(ids: list[str], id_: str) -> bool:
        return any(id_ in vllms_id for vllms_id in ids)

    return [id_ for id_ in request_ids if is_in(waiting, id_) and not is_in(begun, id_)]


def kvroute_unpin(core: EngineCore, name: str) -> float:
    """Remove a pin; return the share of the engine's blocks that requests and pins still hold."""
    core.scheduler.unpin(name)
    usage: float = core.scheduler.kv_cache_manager.usage
    return usage


for _method in (
    kvroute_begin,
    kvroute_emit_held,
    kvroute_end_session,
    kvroute_misfit,
    kvroute_open_tiers,
    kvroute_pinned,
    kvroute_unpin,
    kvroute_unstarted,
):
    setattr(EngineCore, _method.__name__, _method)

apply(IN_ENGINE)
