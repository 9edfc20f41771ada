"""The pulls that requests ask for, in vLLM's scheduler: from their arrival to their results."""

import time
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.request import Request

from kvroute.contract.generation import GenerateRequest
from kvroute.replica.fabric.pull import Pull, PullResult, carried_in
from kvroute.replica.vllm_engine.blocks.events import Pulled

# Key in the extra_args of vLLM's SamplingParams. The value is an encoded PullArgument.
PULL_ARG = "kvroute_pull"
NOTHING = PullResult(tokens=0, size_bytes=0, took_s=0.0)


class PullArgument(NamedTuple):
    """What a request tells the scheduler about its pull."""

    request_id: str  # id of the GenerateRequest
    pull: Pull
    is_all: bool  # True: the request only pulls, and is aborted afterwards


def pull_args(request: GenerateRequest, *, is_all: bool = False) -> dict[str, bytes]:
    """Return the entry of vLLM's extra_args for the request's pull."""
    if (pull := carried_in(request.features, Pull)) is None:
        return {}
    argument = PullArgument(request.request_id, pull, is_all)
    return {PULL_ARG: msgspec.msgpack.encode(argument)}


_decode = msgspec.msgpack.Decoder(PullArgument).decode


@dataclass
class PullOrder:
    """The pull of one request. It is also a state of the request's ReqContext."""

    request: Request
    argument: PullArgument
    arrived_s: float  # time.monotonic at the request's arrival
    has_begun: bool = False  # a request pulls once; what has not arrived then is computed
    is_reported: bool = False
    result: PullResult = NOTHING

    @property
    def deadline_s(self) -> float:
        """Return the time.monotonic at which the pull ends."""
        return self.arrived_s + self.argument.pull.within_s


class PullOrders:
    """The pulls of one scheduler's requests."""

    def __init__(self) -> None:
        self._events: list[KVCacheEvent] = []

    def begin(self, request: Request, context: ReqContext) -> None:
        """Read the pull of a request that has arrived, if it has one."""
        params = request.sampling_params
        packed = params and params.extra_args and params.extra_args.get(PULL_ARG)
        if packed:
            order = PullOrder(request, _decode(packed), time.monotonic())
            request.kvroute_pull = order
            context.set_state(order)

    def end(self, request: Request) -> bool:
        """Report the result of a request's pull, once; the request need not wait any more.

        Returns:
            Whether the request must not be computed.
        """
        order: PullOrder | None = getattr(request, "kvroute_pull", None)
        if order is None:
            return False
        if not order.is_reported:
            order.is_reported = True
            self._events.append(Pulled(order.argument.request_id, order.result))
        return order.argument.is_all

    @property
    def has_results(self) -> bool:
        """Return whether there are results that take_events has not returned yet."""
        return bool(self._events)

    def take_events(self) -> list[KVCacheEvent]:
        """Return the results since the last call."""
        events, self._events = self._events, []
        return events
