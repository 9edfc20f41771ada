"""Calls to one data parallel rank of vLLM's engine.

Each rank is a process with its own scheduler and KV cache.
"""

from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM


class RankCore:
    """Access to the engine core of one rank from the replica's process."""

    def __init__(self, llm: AsyncLLM, rank: int) -> None:
        self.llm = llm
        self.rank = rank

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the rank's EngineCore by name, and return its result.

        Besides vLLM's own methods, EngineCore has methods that scheduler.py adds.
        """
        client = self.llm.engine_core
        engine = client.core_engines[self.rank]
        return await client._call_utility_async(method, *args, engine=engine)


class AtRank:
    """An AsyncLLM that sends all its requests to one rank.

    It is needed for methods of AsyncLLM that have no argument for the rank, such as `encode`.
    """

    def __init__(self, llm: AsyncLLM, rank: int) -> None:
        self._llm = llm
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def add_request(self, *args: Any, **options: Any) -> Any:
        return await self._llm.add_request(*args, **options | {"data_parallel_rank": self._rank})
