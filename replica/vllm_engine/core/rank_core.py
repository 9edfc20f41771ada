"""One data parallel rank of vLLM's engine: a process with a scheduler and a KV cache of its own."""

from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM


class RankCore:
    """The rank's engine core, as its client in this process reaches it."""

    def __init__(self, llm: AsyncLLM, rank: int) -> None:
        self.llm = llm
        self.rank = rank

    async def call(self, method: str, *args: Any) -> Any:
        """The result of a method of EngineCore, or of one that scheduler.py adds to it."""
        client = self.llm.engine_core
        engine = client.core_engines[self.rank]
        return await client._call_utility_async(method, *args, engine=engine)


class AtRank:
    """An AsyncLLM whose requests go to one rank, for its methods that cannot name any."""

    def __init__(self, llm: AsyncLLM, rank: int) -> None:
        self._llm = llm
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def add_request(self, *args: Any, **options: Any) -> Any:
        return await self._llm.add_request(*args, **options | {"data_parallel_rank": self._rank})
