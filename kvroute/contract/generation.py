"""A request and the chunks of its response."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvroute.contract.http_call import HttpCall, HttpPart, joined_parts

TokenIds = NDArray[np.uint32]
TraceContext = Mapping[str, str]  # W3C's headers: traceparent, tracestate

NO_TOKENS: TokenIds = np.array([], np.uint32)
BYTES_A_TOKEN = 64  # of an HTTP response, when what waits for a client is weighed


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters under vLLM's names; the defaults are OpenAI's."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1  # choices, generated from one shared prompt
    logprobs: int | None = None  # alternatives reported for each generated token; None: no logprobs
    ignore_eos: bool = False

    @property
    def can_continue(self) -> bool:
        """Whether a second engine can continue a response exactly where the first one failed.

        It cannot with several choices: a prompt can hold only one of them. It cannot with a
        presence penalty: that applies once per token, however often the token occurs, and the
        second engine does not count the tokens of the first one.
        """
        return self.n == 1 and self.presence_penalty == 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    request_id: str
    token_ids: TokenIds  # shape (n,): the prompt, then the tokens that another engine generated
    sampling: Sampling  # of the whole response, including tokens from another engine
    namespace: str = ""  # cache salt: prefixes are shared within one namespace only
    answered: int = 0  # how many trailing token_ids belong to the response
    trace: TraceContext | None = None  # the parent span; None: not traced
    lora: str = ""  # name of the LoRA adapter; empty: the base model
    pin: str = ""  # the prompt's full blocks stay in the KV cache under this name
    expected_tokens: int = 0  # how many of token_ids the router expects in the KV cache
    call: HttpCall | None = None  # the HTTP request to answer; then `sampling` is not used

    @property
    def prompt_ids(self) -> TokenIds:
        return self.token_ids[: len(self.token_ids) - self.answered]

    @property
    def answered_ids(self) -> TokenIds:
        return self.token_ids[len(self.token_ids) - self.answered :]

    def after(self, delivered: Sequence[int]) -> "GenerateRequest":
        """The rest of the request, once the tokens `delivered` have reached the client."""
        token_ids = np.concatenate([self.token_ids, np.array(delivered, np.uint32)])
        return replace(self, token_ids=token_ids, answered=self.answered + len(delivered))


class Alternative(Struct, frozen=True, array_like=True, gc=False):
    token: str
    token_id: int
    logprob: float


class TokenLogprob(Struct, frozen=True, array_like=True):
    chosen: Alternative
    top: tuple[Alternative, ...] = ()  # likeliest first


class Chunk(Struct, frozen=True, array_like=True):
    """The next tokens of one choice; under load a chunk has several tokens."""

    index: int  # which of the n choices
    text: str  # may be empty: a character can need several tokens, a stop string is held back
    token_ids: tuple[int, ...]
    cached_tokens: int  # prompt tokens served from the KV cache; the same in all chunks
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None  # "stop" | "length" on a choice's last chunk
    http: HttpPart | None = None  # of a request with a `call`; then `text` and `logprobs` are empty


def dispatch_id(client_id: str) -> str:
    """An id for one prompt of the request. It is unique, even if clients use a request id twice."""
    return f"{client_id}-{secrets.token_hex(8)}"


def client_id(dispatch_id: str) -> str:
    """The request's id as the client knows it."""
    return dispatch_id.rpartition("-")[0]


def weight(chunk: Chunk) -> int:
    """Its tokens, and the alternatives of their logprobs; an HTTP response's bytes as tokens."""
    tokens = len(chunk.token_ids)
    if chunk.http is not None:
        return tokens + len(chunk.http.data) // BYTES_A_TOKEN
    if chunk.logprobs:
        tokens += sum([1 + len(each.top) for each in chunk.logprobs])
    return tokens


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk with the content of all; they are of one choice."""
    if len(chunks) == 1:
        return chunks[0]
    last = chunks[-1]
    return Chunk(
        last.index,
        "".join([chunk.text for chunk in chunks]),
        tuple([id_ for chunk in chunks for id_ in chunk.token_ids]),
        last.cached_tokens,
        tuple([each for chunk in chunks for each in chunk.logprobs]),
        last.finish_reason,
        joined_parts([chunk.http for chunk in chunks if chunk.http]) if last.http else None,
    )


class EngineDeadError(RuntimeError):
    """The engine cannot continue; the replica must be replaced."""


class PinRefusedError(ValueError):
    """Pins would exceed their share of the KV cache."""
