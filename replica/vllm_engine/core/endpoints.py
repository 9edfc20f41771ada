"""Gives each data parallel rank its own endpoints for KV events.

vLLM has one setting for all ranks and adds the rank to its port. But that port may be in use. Here
the setting lists the endpoints of all ranks. scheduler.py imports this module in each engine's
process.
"""

from collections.abc import Iterable

from vllm.distributed.kv_events import EventPublisherFactory, ZmqEventPublisher

SEPARATOR = "\n"  # between endpoints; no endpoint contains it


def listed(endpoints: Iterable[str]) -> str:
    """Return the value of vLLM's setting for the endpoints of all ranks, in the ranks' order."""
    return SEPARATOR.join(endpoints)


class RankPublisher(ZmqEventPublisher):
    """vLLM's publisher; it takes the endpoints of its own rank from the lists."""

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
        return endpoint and endpoint.split(SEPARATOR)[data_parallel_rank]


EventPublisherFactory._registry["zmq"] = RankPublisher
