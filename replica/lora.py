"""vLLM's LoRA adapters: in the engine's memory when a request needs them.

vLLM would load them by itself, in the middle of a step, and the engine dies of one that it cannot
load. So they are loaded before the request is handed over, where an error is the request's own.
"""

import asyncio
import time
from collections.abc import Iterable

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from replica.adapters import LOAD_S, Adapter


class Adapters:
    """Those that one engine may load."""

    def __init__(self, llm: AsyncLLM, adapters: Iterable[Adapter]) -> None:
        self._llm = llm
        self._known = {
            adapter.name: LoRARequest(adapter.name, number, adapter.path)
            for number, adapter in enumerate(adapters, start=1)
        }
        self._loading = asyncio.Lock()
        self.loaded: list[str] = []  # names, the next to go first
        self.load_s = LOAD_S  # what loading took lately, in the mean

    async def ready(self, name: str) -> LoRARequest | None:
        """What vLLM is to be told with a request for that adapter, which is loaded; None without a
        name. ValueError where there is no such adapter, or its files cannot be loaded."""
        if not name:
            return None
        if name not in self._known:
            raise ValueError(
                f"this replica has no LoRA adapter {name!r}; there are {', '.join(self._known)}"
            )
        async with self._loading:
            if name not in self.loaded:
                await self._load(self._known[name])
            else:
                self.loaded.remove(name)
            self.loaded.append(name)
        return self._known[name]

    async def _load(self, adapter: LoRARequest) -> None:
        began_s = time.monotonic()
        try:
            await self._llm.add_lora(adapter)
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM tells its engine's errors as nothing more special
            raise ValueError(
                f"the LoRA adapter {adapter.lora_name!r} cannot be loaded from "
                f"{adapter.lora_path}: {error}"
            ) from error
        self.load_s += (time.monotonic() - began_s - self.load_s) / 2
        left = await self._llm.list_loras()  # another one may have had to go
        self.loaded = [name for name in self.loaded if self._known[name].lora_int_id in left]
