"""vLLM's schedulers with nine additions.

Events about blocks have fingerprints, clears are published at once, the cached blocks can be
listed, blocks can be pinned, they are evicted in an order of our own (blocks/keeping.py), a tier in
host memory obeys the same order and tells of its blocks in the same way (host/tier.py), a preempted
request leaves no uncomputed block in the cache, the grammar of a response that another engine began
goes on where it stood, and the engine dies with its replica.

vLLM loads these classes by name inside the engine's process. They use private API of the pinned
version; tests/slow/engines/test_engine.py checks what they rely on.
"""

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
from kvroute.replica.vllm_engine.blocks.division import Division, division_of
from kvroute.replica.vllm_engine.blocks.events import EventBatch, Held
from kvroute.replica.vllm_engine.blocks.keeping import Keeping
from kvroute.replica.vllm_engine.blocks.pool import copies_of, fingerprint
from kvroute.replica.vllm_engine.core import endpoints  # noqa: F401  # the publisher of each rank
from kvroute.replica.vllm_engine.grammar.backends import Grammars
from kvroute.replica.vllm_engine.process.die_with_parent import die_with_parent

if TYPE_CHECKING:
    from kvroute.replica.vllm_engine.host.tier import HostTier

# In a request's extra_args: the name under which its prompt is pinned, in either memory.
PIN, HOST_PIN = "kvroute_pin", "kvroute_host_pin"


@dataclass(frozen=True)
class _Pin:
    """It holds blocks like a request does."""

    tokens: int  # of the prompt, that are found
    blocks: list[tuple[BlockPool, list[KVCacheBlock]]]  # of each group

    def hold(self) -> None:
        for pool, blocks in self.blocks:
            pool.touch(blocks)

    def release(self) -> None:
        for pool, blocks in self.blocks:
            pool.free_blocks(reversed(blocks))


def _held(blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
    """A group has null blocks in place of those that it does not need."""
    return [block for block in blocks if not block.is_null]


class _Kvroute:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Grammars.take_over(self.structured_output_manager)  # type: ignore[attr-defined]
        self.pins: dict[str, _Pin] = {}
        self.keeping = Keeping(self.kv_cache_manager, self._pools)  # type: ignore[attr-defined]
        self.host = self._host_tier()
        die_with_parent()

    def begin(self, space: Space) -> Division:
        """Before the first request: from now on, events have fingerprints."""
        for pool in self._pools:
            fingerprint(pool, space)
        division = division_of(self.kv_cache_manager, space.block_size)  # type: ignore[attr-defined]
        return self.host.begin(space, division) if self.host else division

    def _host_tier(self) -> "HostTier | None":
        connector = self.connector  # type: ignore[attr-defined]
        if connector is None:
            return None
        from kvroute.replica.vllm_engine.host.tier import host_tier_of  # with vLLM's connector

        return host_tier_of(connector)

    def _free_blocks(self, request: Request) -> None:
        """vLLM calls this at a request's end, not when it is preempted."""
        params = request.sampling_params
        extra = (params and params.extra_args) or {}
        if request.status != RequestStatus.FINISHED_ABORTED:
            if name := extra.get(PIN):
                self._pin(name, request)
            if self.host and (name := extra.get(HOST_PIN)):
                self.host.pin(name, request)
        self.keeping.label(request)
        if self.host:
            self.host.ended(request)
        super()._free_blocks(request)  # type: ignore[misc]

    def end_session(self, session: int) -> None:
        self.keeping.end(session, self.requests.values())  # type: ignore[attr-defined]
        if self.host:
            self.host.end(session)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """vLLM caches blocks when their computation is scheduled. By priorities it also preempts
        requests that this step has scheduled already, whose new blocks nothing will compute."""
        for manager in self._managers:
            blocks = manager.req_to_blocks.get(request.request_id, [])
            uncomputed = blocks[request.num_computed_tokens // manager.block_size :]
            manager.block_pool.evict_blocks({block.block_id for block in _held(uncomputed)})
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _pin(self, name: str, request: Request) -> None:
        """Holds what a prompt that begins with this one finds: of full attention all blocks, of
        windows the last ones, of states one. They replace the earlier blocks of that name."""
        coordinator = self.kv_cache_manager.coordinator  # type: ignore[attr-defined]
        found, tokens, _ = coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_prompt_tokens
        )
        managers = zip(coordinator.single_type_managers, found, strict=True)
        pin = _Pin(tokens, [(each.block_pool, _held(blocks)) for each, blocks in managers])
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
        """Some models keep a part of their groups in host memory, in another pool."""
        return list(dict.fromkeys(manager.block_pool for manager in self._managers))

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Also removes the pins and publishes AllBlocksCleared at once: vLLM would delay it until
        the next step, which an idle engine does not have."""
        pins = dict(self.pins)
        for name in pins:
            self.unpin(name)
        done: bool = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        if done:
            self.keeping.clear()
            if self.host:
                self.host.clear()
        else:
            for pin in pins.values():
                pin.hold()
            self.pins = pins
        self._publish_events()
        return done

    def reset_connector_cache(self) -> bool:
        """A host tier is cleared with the engine's own memory, and only then."""
        done: bool = self.host is not None or super().reset_connector_cache()  # type: ignore[misc]
        return done

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """It publishes the step's events."""
        if self.host:
            self.host.meter.computed(scheduler_output)
        return super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def emit_held(self) -> None:
        """Publishes the cached blocks. It blocks the engine for about 0.5 ms per 1,000 blocks."""
        groups = len(self.kv_cache_config.kv_cache_groups)  # type: ignore[attr-defined]
        copies = copies_of(self._pools, groups)
        if self.host:
            copies += self.host.copies_of()
        self._publish_events(Held(copies))

    def _publish_events(self, *more: kv_events.KVCacheEvent) -> None:
        """Publishes pending events now, then the given ones."""
        of_host = self.host.take_events() if self.host else ()
        events = [*self.kv_cache_manager.take_events(), *of_host, *more]  # type: ignore[attr-defined]
        if events:
            self.kv_event_publisher.publish(  # type: ignore[attr-defined]
                EventBatch(ts=time.time(), events=events)
            )


class KvrouteScheduler(_Kvroute, Scheduler):
    """For CPUs, where vLLM schedules in step with the model."""


class KvrouteAsyncScheduler(_Kvroute, AsyncScheduler):
    """For GPUs, where the next step is scheduled while the last one runs."""


# vLLM's client calls these functions in the engine's process by name, as methods of its core.


def kvroute_emit_held(core: EngineCore) -> None:
    core.scheduler.emit_held()


def kvroute_begin(core: EngineCore, model: str, revision: str, block_size: int) -> dict[str, Any]:
    """Returns a Division, as plain values."""
    division: Division = core.scheduler.begin(Space(model, revision, block_size))
    core.mm_receiver_cache = None  # media.py: images come with each request
    plain: dict[str, Any] = msgspec.to_builtins(division)
    return plain


def kvroute_pinned(core: EngineCore, name: str) -> int:
    """Tokens."""
    pin: _Pin | None = core.scheduler.pins.get(name)
    return pin.tokens if pin else 0


def kvroute_end_session(core: EngineCore, session: int) -> None:
    core.scheduler.end_session(session)


def kvroute_unpin(core: EngineCore, name: str) -> float:
    """Removes the pin; returns the share of the cache that is in use then."""
    core.scheduler.unpin(name)
    usage: float = core.scheduler.kv_cache_manager.usage
    return usage


for _method in (
    kvroute_begin,
    kvroute_emit_held,
    kvroute_end_session,
    kvroute_pinned,
    kvroute_unpin,
):
    setattr(EngineCore, _method.__name__, _method)
