"""Each data parallel rank publishes its KV events at endpoints of its own.

vLLM has one setting for all ranks and adds the rank to a port, which may be taken. Here the setting
lists the endpoints of all ranks. scheduler.py imports this in each engine's process.
"""

from collections.abc import Iterable

from vllm.distributed.kv_events import EventPublisherFactory, ZmqEventPublisher

SEPARATOR = "\n"  # which no path has


def listed(endpoints: Iterable[str]) -> str:
    """The value of vLLM's setting; endpoints: by rank."""
    return SEPARATOR.join(endpoints)


class RankPublisher(ZmqEventPublisher):
    """vLLM's publisher, which takes its own endpoints from the lists."""

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
        return endpoint and endpoint.split(SEPARATOR)[data_parallel_rank]


EventPublisherFactory._registry["zmq"] = RankPublisher
