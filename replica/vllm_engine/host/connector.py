"""vLLM's OffloadingConnector and its manager, with the changes that host/tier.py needs."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadKey, PrepareStoreOutput, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvroute.contract.keep import RetentionHint
from kvroute.replica.vllm_engine.host.meter import Meter
from kvroute.replica.vllm_engine.host.pull_orders import PullOrders

if TYPE_CHECKING:
    from kvroute.replica.vllm_engine.host.disk import DiskTier


@dataclass
class EndedRequest:
    """The blocks of a request that has ended, and their retention.

    Some of the blocks may not be copied to host memory yet. So the retention is set again after
    each copy. If the session ends before a copy, the hint is replaced (SchedulerHostTier.end).
    """

    keys: Sequence[OffloadKey]  # the request's blocks, in the prompt's order
    hint: RetentionHint


class Manager(CPUOffloadingManager):
    """vLLM's manager of a host tier, changed to evict a prompt's last blocks first.

    For this, the manager sorts the blocks of each copy. vLLM itself lists them in no particular
    order. With pulls, host/spec.py has a subclass.
    """

    kvroute_on_stored: Callable[[EndedRequest], None]  # called after copies for an ended request
    # Maximum number of tokens, from the start of a prompt, that are copied to host memory. This is
    # the size of the tier. Copies of further blocks would evict the blocks of all other prompts,
    # and then the prompt's own first blocks, without which its other blocks are useless.
    kvroute_max_tokens: float = math.inf

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        ends, max_tokens = req_context._offload_key_positions, self.kvroute_max_tokens
        stored = [key for key in keys if ends.get(key, 0) <= max_tokens]
        return super().prepare_store(stored, req_context)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        super().complete_store(_last_first(keys, req_context), req_context, success)
        if ended := req_context.get_state(EndedRequest):
            self.kvroute_on_stored(ended)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        super().complete_load(_last_first(keys, req_context), req_context)


def _last_first(keys: Collection[OffloadKey], context: ReqContext) -> list[OffloadKey]:
    ends = context._offload_key_positions
    return sorted(keys, key=lambda key: ends.get(key, 0), reverse=True)


class HostTierConnector(OffloadingConnector):
    """vLLM's connector, which reloads blocks only if that is faster than computing them.

    It reports steps and copies to a Meter, which measures their times.
    """

    kvroute_meter: Meter
    kvroute_pulls: PullOrders | None = None  # None: the engine does not pull
    kvroute_disk: "DiskTier | None" = None  # None: there is no disk cache

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        if self.kvroute_pulls:
            context = self.scheduler._req_status[request.request_id].req_context
            self.kvroute_pulls.begin(request, context)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens to reload from host memory; 0 if computing them is faster.

        None: the request waits for blocks, for example for a pull.
        """
        tokens: int | None
        is_async: bool
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens is not None and self.kvroute_pulls and self.kvroute_pulls.end(request):
            return None, False
        start = num_computed_tokens
        if tokens and not self.kvroute_meter.is_cheaper(start, start + tokens):
            return 0, False
        return tokens, is_async

    def _max_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens may be reloaded. The block with the last token is excluded.

        That block is always computed, because a request needs the logits of its last token. vLLM
        itself excludes the block only for models that have other groups than full attention.
        """
        bound: int | None = super()._max_loadable_tokens(request, num_computed_tokens)
        groups = self.scheduler.config.kv_group_configs
        if len(groups) > 1 or bound is not None:
            return bound
        block_tokens: int = groups[0].tokens_per_chunk
        reusable: int = (request.num_tokens - 1) // block_tokens * block_tokens
        return max(0, reusable - num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.kvroute_meter.record_reload(num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self.kvroute_meter.record_scheduled(scheduler_output)
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        done = connector_output.kv_connector_worker_meta
        if isinstance(done, OffloadingWorkerMetadata):
            self.kvroute_meter.record_copies(done)
        super().update_connector_output(connector_output)

    def take_events(self) -> list[KVCacheEvent]:
        events = [*super().take_events(), *self.kvroute_meter.take_events()]
        if self.kvroute_pulls:
            events += self.kvroute_pulls.take_events()
        if self.kvroute_disk:
            events += self.kvroute_disk.take_changes()
        return events
