"""A request to an engine, the chunks of its response, and its errors."""

import secrets
from collections import ChainMap
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kvroute.blocks.chain import Scope
from kvroute.contract.http_call import HttpCall, HttpPart, joined_parts
from kvroute.contract.keep import RetentionHint

TokenIds = NDArray[np.uint32]
TraceContext = Mapping[str, str]  # W3C's headers: traceparent, tracestate

NO_TOKENS: TokenIds = np.array([], np.uint32)
BYTES_PER_TOKEN = 64  # bytes of an HTTP response that `weight` counts as one token


class GenerateRequest(Struct, frozen=True, array_like=True):
    """One prompt that an engine runs.

    Routers send the fields before `pin`, in this order; a replica sets the others for itself.
    """

    request_id: str
    token_ids: TokenIds  # shape (n,): the prompt, then the tokens that another engine generated
    namespace: str = ""  # cache salt: prefixes are shared within one namespace only
    answered: int = 0  # how many trailing token_ids belong to the response
    trace: TraceContext | None = None  # the parent span; None: not traced
    variant: str = ""  # the variant of the model; see Scope
    expected_tokens: int = 0  # how many of token_ids the router expects in the KV cache
    call: HttpCall | None = None  # the HTTP request to answer; None: no client reads the tokens
    max_tokens: int = 1  # tokens to generate if there is no call
    rank: int = 0  # number of the replica's data parallel rank that runs the request
    shared_tokens: int = 0  # tokens of the first blocks, which all namespaces share
    # Sort key in the engine's queue, in seconds from the arrival at the engine; the lowest key is
    # first. It is relative, since hosts' clocks differ. Negative: the request has waited elsewhere.
    order_s: float = 0.0
    waited_s: float = 0.0  # seconds in the router's queue because no replica had capacity
    keep: RetentionHint | None = None  # retention hint for the blocks; None: evict by age only
    # True: a batch request; it gives way to other requests in the engine (contract/priority.py).
    is_batch: bool = False
    features: dict[str, bytes] | None = None  # name of a feature -> its data for the engine
    pin: str = ""  # name of the pin that keeps the prompt's full blocks; empty: no pin
    is_host_pin: bool = False  # True: the pin keeps the blocks in host memory, not in the KV cache

    @property
    def scope(self) -> Scope:
        return Scope(self.variant, self.namespace, self.shared_tokens)

    @property
    def prompt_ids(self) -> TokenIds:
        return self.token_ids[: len(self.token_ids) - self.answered]

    @property
    def answered_ids(self) -> TokenIds:
        return self.token_ids[len(self.token_ids) - self.answered :]

    def after(self, delivered: Sequence[int]) -> "GenerateRequest":
        """Return the rest of the request, once the tokens `delivered` have reached the client."""
        token_ids = np.concatenate([self.token_ids, np.array(delivered, np.uint32)])
        return replace(self, token_ids=token_ids, answered=self.answered + len(delivered))

    def using_all_blocks(self) -> "GenerateRequest":
        """Return the request with one more token at the end.

        An engine never uses the cached block of a prompt's last token. With the extra token, it
        uses all full blocks of this prompt.
        """
        return replace(self, token_ids=np.append(self.token_ids, np.uint32(0)))


class Chunk(Struct, frozen=True, array_like=True, gc=False):
    """The next tokens of an answer. Under load, a chunk has several tokens."""

    token_ids: tuple[int, ...]
    cached_tokens: int  # prompt tokens served from the KV cache; equal in all chunks of an answer
    is_last: bool = False
    http: HttpPart | None = None  # bytes of the HTTP response, if the request has a `call`
    features: dict[str, bytes] | None = None  # name of a feature -> what the engine tells it


Emit = Callable[[Chunk], None]  # receives a request's next chunk
Generate = Callable[[GenerateRequest, Emit], Awaitable[None]]


def dispatch_id(client_id: str) -> str:
    """Return a unique id for one prompt, even if clients use a request id twice."""
    return f"{client_id}-{secrets.token_hex(8)}"


def client_id(dispatch_id: str) -> str:
    """Return the request id that the client sent, from a dispatch id."""
    return dispatch_id.rpartition("-")[0]


def weight(chunk: Chunk) -> int:
    """Return how much memory a chunk takes until it is sent, in tokens.

    Its HTTP bytes count as one token per BYTES_PER_TOKEN.
    """
    data = 0 if chunk.http is None else len(chunk.http.data)
    return len(chunk.token_ids) + data // BYTES_PER_TOKEN


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Join consecutive chunks of one answer into one chunk."""
    if len(chunks) == 1:
        return chunks[0]
    last, features = chunks[-1], [chunk.features for chunk in chunks if chunk.features]
    return Chunk(
        tuple([id_ for chunk in chunks for id_ in chunk.token_ids]),
        last.cached_tokens,
        last.is_last,
        joined_parts([chunk.http for chunk in chunks if chunk.http]) if last.http else None,
        dict(ChainMap(*features)) if features else None,
    )


class EngineDeadError(RuntimeError):
    """The engine cannot continue; the replica must be replaced."""


class EngineAwayError(EngineDeadError):
    """An attached server (one that the user runs) does not answer; it may come back."""


class NotBegunError(RuntimeError):
    """The engine has not begun with the request, and another engine may be able to run it."""


class CannotRunError(RuntimeError):
    """The engine cannot run this model with this configuration; a restart would fail again."""


class PinRefusedError(ValueError):
    """A pin was refused, since all pins together would exceed their share of the KV cache."""


def encode_ids(request_ids: Sequence[str]) -> bytes:
    """Encode the ids of requests."""
    return msgspec.msgpack.encode(request_ids)


def decode_ids(packed: bytes) -> list[str]:
    """Decode the ids of requests. Raises one of unreadable.DECODE_ERRORS."""
    return msgspec.msgpack.decode(packed, type=list[str])
