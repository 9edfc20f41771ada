"""The interface of every engine."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from kvroute.contract.generation import Emit, GenerateRequest
from kvroute.contract.http_call import HttpCall, Rendered
from kvroute.contract.records import EngineFacts, Load
from kvroute.replica.engine.kv_events import KVEvent


class Engine(Protocol):
    facts: EngineFacts
    # For each group of its KV cache, its entry in the layout; then the same for what host memory
    # has of them, from HOST_GROUPS on, if it has a host tier.
    members: Sequence[int | None]

    @property
    def pins(self) -> Mapping[str, int]:
        """Number of blocks that are pinned in its own memory, by the pin's name."""
        ...

    @property
    def host_pins(self) -> Mapping[str, int]:
        """The same for host memory."""
        ...

    async def generate(self, request: GenerateRequest, emit: Emit) -> None:
        """Emits chunks as they are generated. Cancelling it aborts the request.

        A response that another engine began continues as if this engine had generated all of it:
        the text after the `answered` tokens, the stop strings, the limits on its length.

        When a request with a `pin` finishes, the prompt's full blocks are pinned and replace the
        earlier blocks of that name. They are never evicted, and serve requests of the same
        namespace and adapter; with `is_host_pin`, host memory never drops its copies of them
        instead. Raises PinRefusedError, before any computation, when the pin does
        not fit. Raises ValueError for a LoRA adapter that is unknown or cannot be loaded.

        When a request ends, its blocks are evicted in the order that its `keep` asks for
        (retention.py).

        The chunks of a request with a `call` are the HTTP response to it.
        """
        ...

    async def render(self, call: HttpCall) -> Rendered:
        """The prompt that `generate` would make of this call."""
        ...

    async def unpin(self, name: str) -> None:
        """Removes the pin; blocks can be evicted when no other pin and no request holds them."""
        ...

    async def end_session(self, session: int) -> None:
        """Blocks that only this session uses are evicted before all others."""
        ...

    def events(self) -> AsyncIterator[list[KVEvent]]:
        """KV cache changes in order; for one reader."""
        ...

    def load(self) -> Load: ...

    async def check(self) -> None:
        """Raises EngineDeadError when the engine cannot continue."""
        ...

    async def emit_held(self) -> None:
        """Adds BlocksHeld to the events, at the position where it is exact; no effect without
        prefix caching."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Clears all cached blocks and pins. While requests hold blocks, it clears nothing and
        returns False."""
        ...

    async def close(self) -> None: ...
