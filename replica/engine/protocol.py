"""The interface that all engines implement for the replica: vLLM, attached and simulated ones."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from kvroute.contract.adapters import Adapter
from kvroute.contract.generation import Emit, GenerateRequest
from kvroute.contract.http_call import HttpCall, Rendered
from kvroute.contract.records import EngineFacts, Load
from kvroute.replica.engine.kv_events import KVEvent

AdapterCheck = Callable[[Adapter], None]


def any_files(adapter: Adapter) -> None:
    """Accept the files of any adapter."""


class Engine(Protocol):
    """One data parallel rank of an engine."""

    facts: EngineFacts
    can_add_adapters: bool = False  # whether `admit_adapter` works
    # For each group of the KV cache, the number of its entry in the published layout
    # (blocks/cache_groups.py). None: the group takes no part in prefix caching. With a host tier,
    # the entries of the same groups in host memory follow; their numbers start from HOST_GROUPS.
    group_entries: Sequence[int | None]

    @property
    def pins(self) -> Mapping[str, int]:
        """Return the number of blocks of each pin in the engine's own memory."""
        ...

    @property
    def host_pins(self) -> Mapping[str, int]:
        """Return the number of blocks of each pin in host memory."""
        ...

    async def generate(self, request: GenerateRequest, emit: Emit) -> None:
        """Run a request, and emit its chunks as they are generated.

        Cancelling this call aborts the request.

        - Continuation: another engine has generated the last `answered` tokens of the request. The
          response continues as if this engine had generated them. Text decoding, stop strings and
          limits on the length include these tokens.
        - Pins: when a request with a `pin` finishes, the full blocks of its prompt are pinned. They
          replace the blocks of an earlier pin with this name. Pinned blocks are not evicted, and
          requests with the same namespace and adapter can use them. With `is_host_pin`, the copies
          of the blocks in host memory are pinned instead.
        - Retention: when a request ends, its `keep` determines when its blocks are evicted
          (retention.py).
        - HTTP: if the request has a `call`, its chunks are the HTTP response to the call.

        Raises:
            PinRefusedError: The pin exceeds the limit on pinned blocks. This is checked before any
                computation.
            ValueError: The LoRA adapter is unknown or cannot be loaded.
        """
        ...

    def admit_adapter(self, adapter: Adapter, check: AdapterCheck = any_files) -> None:
        """Accept requests for an adapter from now on.

        It is loaded when it is first needed. Engines without `can_add_adapters` refuse.

        Args:
            adapter: The adapter; its name is the variant in requests.
            check: Called in a thread before each load. It raises ValueError if the files cannot be
                used.

        Raises:
            ValueError: The engine cannot load adapters after its start.
        """
        raise ValueError(
            f"this engine ({self.facts.engine}) cannot load adapters after its start; name them "
            "with --lora"
        )

    async def load_adapter(self, name: str) -> None:
        """Load an admitted adapter.

        Raises:
            ValueError: The adapter cannot be loaded.
        """
        raise ValueError(f"the adapter {name} was not admitted")

    async def drop_adapter(self, name: str) -> None:
        """Unload an admitted adapter, and refuse requests for it. No request may be using it."""
        return

    async def render(self, call: HttpCall) -> Rendered:
        """Return the prompt that `generate` would use for this call."""
        ...

    async def unpin(self, name: str) -> None:
        """Remove a pin. Its blocks can be evicted once no other pin and no request holds them."""
        ...

    async def end_session(self, session: int) -> None:
        """End a session. Blocks that only this session uses are then evicted before all others."""
        ...

    def events(self) -> AsyncIterator[list[KVEvent]]:
        """Yield the changes of the KV cache in order. There must be only one reader."""
        ...

    def load(self) -> Load: ...

    async def unstarted(self, request_ids: Sequence[str]) -> list[str]:
        """Return those of these requests that wait in the engine's queue.

        An engine that cannot tell which of its requests wait returns none.
        """
        return []

    async def check(self) -> None:
        """Raise EngineDeadError if the engine cannot continue."""
        ...

    async def wait_until_away(self) -> str:
        """Wait until the engine is away, that is, until it can run no requests; return the reason.

        While an engine is away, its replica is not in the index. Only an attached engine, on a
        server that kvroute did not start, can be away. For all others, this call never returns.
        """
        return await asyncio.Future()

    async def wait_until_back(self) -> None:
        """Return when the engine can run requests, and all events of its KV cache are known."""
        return

    async def emit_held(self) -> None:
        """Emit a BlocksHeld event, in order with the other events.

        This does nothing without prefix caching.
        """
        ...

    async def reset_prefix_cache(self) -> bool:
        """Clear all cached blocks and pins, and return True.

        If requests hold blocks, clear nothing and return False.
        """
        ...

    async def close(self) -> None: ...
