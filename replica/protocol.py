"""What every engine does, and the values that cross between a router and a replica."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from replica.adapters import LOAD_S
from replica.events import Comparison, KVEvent

TokenIds = NDArray[np.uint32]
TraceContext = Mapping[str, str]  # W3C's headers: traceparent, tracestate


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters under vLLM's names; the defaults are OpenAI's."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: every token
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1  # choices, generated from one shared prompt
    logprobs: int | None = None  # alternatives reported for each generated token; None: no logprobs
    ignore_eos: bool = False

    @property
    def can_continue(self) -> bool:
        """Whether one engine can go on exactly where another one was lost.

        Not with several choices, of which a prompt can hold but one; nor with a presence penalty,
        which falls once on a token however often it is said, so that it matters who said it first.
        """
        return self.n == 1 and self.presence_penalty == 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    request_id: str
    token_ids: TokenIds  # the prompt, shape (n,), and what has been answered of it elsewhere
    sampling: Sampling  # of the whole answer, whoever begins it
    namespace: str = ""  # cache salt: prefixes are shared within one namespace only
    answered: int = 0  # that many trailing token_ids are the answer's beginning
    trace: TraceContext | None = None  # the span that asks; None: nobody traces it
    lora: str = ""  # name of the LoRA adapter; empty: the model as it is
    pin: str = ""  # under this name the prompt's full blocks stay in the KV cache
    expected_tokens: int = 0  # of token_ids, that the router expects in the KV cache

    @property
    def prompt_ids(self) -> TokenIds:
        return self.token_ids[: len(self.token_ids) - self.answered]

    @property
    def answered_ids(self) -> TokenIds:
        return self.token_ids[len(self.token_ids) - self.answered :]

    def after(self, said: Sequence[int]) -> "GenerateRequest":
        """What is left of the request once `said` has reached the client."""
        token_ids = np.concatenate([self.token_ids, np.array(said, np.uint32)])
        return replace(self, token_ids=token_ids, answered=self.answered + len(said))


@dataclass(frozen=True, slots=True)
class Alternative:
    token: str
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    chosen: Alternative
    top: tuple[Alternative, ...] = ()  # likeliest first


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some more tokens of one choice; under load several tokens share a chunk."""

    index: int  # which of the n choices
    text: str  # may be empty: a character can need more tokens, a stop string is held back
    token_ids: tuple[int, ...]
    cached_tokens: int  # prompt tokens served from the KV cache; the same in all chunks
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None  # "stop" | "length" on a choice's last chunk


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine is doing now."""

    running: int = 0  # requests in the batch
    waiting: int = 0  # requests queued in the engine
    used_blocks: int = 0  # KV blocks that running requests and pins hold
    loras: tuple[str, ...] = ()  # LoRA adapters in memory, the next to go first
    lora_load_s: float = LOAD_S  # what it took lately to load one


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is true of an engine for as long as it lives."""

    block_size: int  # tokens
    capacity_blocks: int  # KV blocks in all
    max_model_len: int  # tokens, prompt and output together
    prefill_tokens_per_s: float  # at a prompt's start; a guess: the router learns the real speed
    attention_tokens: float = 32_768.0  # context at which a token's prefill costs twice as much
    prefix_caching: bool = True
    pin_blocks: int = 0  # KV blocks that pins may take
    max_num_seqs: int = 0  # requests in one batch; 0: unknown
    max_cpu_loras: int = 0  # LoRA adapters that memory has room for
    engine: str = "vllm"  # "vllm" | "simulated"


@dataclass(frozen=True, slots=True)
class AuditRequest:
    request_id: str


@dataclass(frozen=True, slots=True)
class ReplicaAudit:
    """What is said of one replica's blocks, by itself and by the index after its change `seq`."""

    replica_id: str
    incarnation: str
    seq: int
    known: Comparison  # what the replica believes to hold, judged by its engine
    index: Comparison  # what Redis has of it, judged by what the replica believes


class EngineDeadError(RuntimeError):
    """The engine cannot answer any more; the replica must be replaced."""


class PinRefusedError(ValueError):
    """Pins would take more of the KV cache than they may."""


class Engine(Protocol):
    facts: EngineFacts

    @property
    def pins(self) -> Mapping[str, int]:
        """Blocks that stay in the KV cache, by the name of their pin."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks as they are made. Closing the generator aborts the request.

        An answer that was begun elsewhere goes on as if this engine had made all of it: the text
        after what `answered` let go, the stop strings, the limits on its length.

        A request with a `pin` that comes to its end leaves the prompt's full blocks pinned, in
        place of what had the name. They are never evicted, and serve requests of the same
        namespace and adapter. PinRefusedError, before anything is computed, where pins may not
        take as much. ValueError for a LoRA adapter that the engine has not, or cannot load.
        """
        ...

    async def unpin(self, name: str) -> None:
        """The blocks may be evicted, once no other pin and no request holds them."""
        ...

    def events(self) -> AsyncIterator[list[KVEvent]]:
        """KV cache changes in the order in which they happened; for one reader."""
        ...

    def load(self) -> Load: ...

    async def check(self) -> None:
        """Raises EngineDeadError when the engine cannot go on."""
        ...

    async def tell_held(self) -> None:
        """BlocksHeld comes among the events, where it is true; never where nothing is cached."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forgets every cached block, and every pin; False, and forgets none, while requests hold
        some."""
        ...

    async def close(self) -> None: ...
