"""The interface of every engine."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from kvroute.contract.generation import Emit, GenerateRequest
from kvroute.contract.http_call import HttpCall, Rendered
from kvroute.contract.records import EngineFacts, Load
from kvroute.replica.engine.kv_events import KVEvent


class Engine(Protocol):
    facts: EngineFacts
    # The layout's entry for each group of the KV cache. With a host tier, the entries for the
    # groups in host memory follow, with numbers from HOST_GROUPS on.
    members: Sequence[int | None]

    @property
    def pins(self) -> Mapping[str, int]:
        """Return each pin's number of blocks in the engine's own memory."""
        ...

    @property
    def host_pins(self) -> Mapping[str, int]:
        """Return each pin's number of blocks in host memory."""
        ...

    async def generate(self, request: GenerateRequest, emit: Emit) -> None:
        """Emit chunks as they are generated. Cancelling this call aborts the request.

        A response that another engine began continues as if this engine had generated all of it.
        This includes the text after the `answered` tokens, stop strings, and limits of the length.

        When a request with a `pin` finishes, the prompt's full blocks are pinned, and replace the
        earlier blocks of a pin of that name. They are never evicted, and requests of the same
        namespace and adapter can use them. With `is_host_pin`, the copies in host memory are pinned
        instead.

        When a request ends, its `keep` decides in which order its blocks are evicted
        (retention.py).

        The chunks of a request with a `call` are the HTTP response to the call.

        Raises:
            PinRefusedError: The pin does not fit. This is checked before any computation.
            ValueError: The LoRA adapter is unknown or cannot be loaded.
        """
        ...

    async def render(self, call: HttpCall) -> Rendered:
        """Return the prompt that `generate` would make for this call."""
        ...

    async def unpin(self, name: str) -> None:
        """Remove the pin; its blocks can be evicted when no other pin and no request holds them."""
        ...

    async def end_session(self, session: int) -> None:
        """End a session: blocks that only this session uses are evicted before all others."""
        ...

    def events(self) -> AsyncIterator[list[KVEvent]]:
        """Yield the changes of the KV cache in order; for one reader."""
        ...

    def load(self) -> Load: ...

    async def check(self) -> None:
        """Raise EngineDeadError if the engine cannot continue."""
        ...

    async def wait_until_away(self) -> str:
        """Wait until the engine can run no requests for a while, and return why.

        While an engine is away, its replica is not in the index. Only engines whose server somebody
        else runs can be away; all others never return.
        """
        return await asyncio.Future()

    async def wait_until_back(self) -> None:
        """Return when the engine can run requests, and all events of its KV cache are known."""
        return

    async def emit_held(self) -> None:
        """Add BlocksHeld to the events, at the position where it is exact.

        This has no effect without prefix caching.
        """
        ...

    async def reset_prefix_cache(self) -> bool:
        """Clear all cached blocks and pins. If requests hold blocks, only return False."""
        ...

    async def close(self) -> None: ...
