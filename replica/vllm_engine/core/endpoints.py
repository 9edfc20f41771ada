"""Gives each data parallel rank its own endpoints for KV events.

vLLM has one endpoint setting for all ranks, and each rank adds its number to the port. But that
port may be in use. Here, the setting contains a list of endpoints, and each rank takes its own.
"""

from collections.abc import Iterable

from vllm.distributed.kv_events import ZmqEventPublisher

SEPARATOR = "\n"  # separates the endpoints in the setting; no endpoint contains it


def join_endpoints(endpoints: Iterable[str]) -> str:
    """Return the value of vLLM's setting: the endpoints of all ranks, in the ranks' order."""
    return SEPARATOR.join(endpoints)


class RankPublisher(ZmqEventPublisher):
    """vLLM's publisher, which takes the endpoint of its own rank from the setting."""

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
        return endpoint and endpoint.split(SEPARATOR)[data_parallel_rank]
