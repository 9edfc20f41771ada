"""Loads a request's LoRA adapter into vLLM before the request starts.

vLLM itself loads an adapter during a step, and an adapter that cannot be loaded kills the engine.
Here, such an error affects only the request that needs the adapter.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from functools import partial

from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from kvroute.blocks.variants import SETUP_S, name_of
from kvroute.contract.adapters import Adapter
from kvroute.replica.engine.protocol import AdapterCheck
from kvroute.replica.vllm_engine.core.rank_core import RankCore


class RankAdapters:
    """The LoRA adapters that one rank of an engine may load. Each rank loads its own copies."""

    def __init__(self, core: RankCore, adapters: Iterable[Adapter], *, can_add: bool) -> None:
        """Create the adapters of a rank.

        Args:
            core: The rank.
            adapters: The adapters of --lora.
            can_add: Whether other adapters can be added later.
        """
        self._core = core
        self.can_add = can_add
        # All adapters that can be loaded: name -> vLLM's argument.
        self.lora_requests = {
            adapter.name: LoRARequest(adapter.name, number, adapter.path)
            for number, adapter in enumerate(adapters, start=1)
        }
        self._named = tuple(
            self.lora_requests
        )  # the adapters of --lora, which all clients may know
        self._numbers = itertools.count(
            1 + len(self.lora_requests)
        )  # numbers of the adapters that are added later
        self._checks: dict[str, Callable[[], None]] = {}  # of the adapters that are added later
        self._loading = asyncio.Lock()
        self.loaded: list[str] = []  # names of loaded adapters; the first one is evicted next
        self.load_s = SETUP_S  # moving average of the seconds to load an adapter

    async def ready(self, name: str) -> LoRARequest | None:
        """Load the adapter if necessary, and return vLLM's argument for it.

        Returns None if `name` is empty.

        Raises:
            ValueError: The adapter is unknown, or its files cannot be loaded.
        """
        if not name:
            return None
        if name not in self.lora_requests:
            raise ValueError(
                f"this replica has no LoRA adapter {name!r}; it has {', '.join(self._named)}"
            )
        async with self._loading:
            if name not in self.loaded:
                await self._load(self.lora_requests[name])
            else:
                self.loaded.remove(name)
            self.loaded.append(name)
        return self.lora_requests[name]

    def admit(self, adapter: Adapter, check: AdapterCheck) -> None:
        """Accept requests for an adapter that is added after the engine's start.

        Args:
            adapter: The adapter.
            check: Called before each load. It raises ValueError if the files cannot be used.
        """
        if adapter.name not in self.lora_requests:
            request = LoRARequest(adapter.name, next(self._numbers), adapter.path)
            self.lora_requests[adapter.name] = request
            self._checks[adapter.name] = partial(check, adapter)

    async def drop(self, name: str) -> None:
        """Unload an adapter that no request uses, and refuse requests for it."""
        async with self._loading:
            request = self.lora_requests.pop(name, None)
            self._checks.pop(name, None)
            if request is not None and name in self.loaded:
                self.loaded.remove(name)
                await self._core.call("remove_lora", request.lora_int_id)

    async def _load(self, adapter: LoRARequest) -> None:
        began_s, misfit = time.monotonic(), ""
        try:
            if check := self._checks.get(adapter.lora_name):
                await asyncio.to_thread(check)
            await self._core.call("add_lora", adapter)
            if misfit := await self._core.call("kvroute_misfit", adapter.lora_int_id):
                await self._core.call("remove_lora", adapter.lora_int_id)
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM raises errors of its engine as plain Exception
            raise _unusable(adapter, str(error)) from error
        took_s = time.monotonic() - began_s
        self.load_s = took_s if self.load_s == SETUP_S else (self.load_s + took_s) / 2
        resident = await self._core.call("list_loras")  # loading may have evicted another adapter
        self.loaded = [
            name for name in self.loaded if self.lora_requests[name].lora_int_id in resident
        ]
        if misfit:
            raise _unusable(adapter, misfit)


def _unusable(adapter: LoRARequest, why: str) -> ValueError:
    return ValueError(
        f"the LoRA adapter {name_of(adapter.lora_name)!r} cannot be loaded from "
        f"{adapter.lora_path}: {why}"
    )
