"""What a router and a replica say to each other, as typed values in msgpack.

A new field needs a default and leaves VERSION unchanged. VERSION rises when an older process would
misunderstand a message.
"""

import math
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct

from kvroute.contract.generation import Chunk, GenerateRequest, TokenIds
from kvroute.contract.http_call import HttpCall
from kvroute.contract.keep import Keep
from kvroute.contract.records import Count

VERSION = 3
NONCE_BYTES = 16
MOST_ORDER_S = 1e6  # either way; longer than any request waits

# How a request ends. refused: the replica has no room, or is to stop. invalid: it can never run.
# dead: the engine has died. failed: anything else.
Outcome = Literal["done", "refused", "invalid", "dead", "failed"]


class Challenge(Struct, array_like=True):
    """The replica's first message."""

    version: int
    nonce: bytes


class Proof(Struct, array_like=True):
    """The router knows the secret; now the replica has to prove the same."""

    version: int
    proof: bytes
    nonce: bytes


class Welcome(Struct, array_like=True):
    proof: bytes


class Begin(Struct, array_like=True):
    """Starts a stream of chunks. The fields are those of GenerateRequest."""

    stream: int  # its number on this connection
    request_id: str
    token_ids: bytes  # 4 each, little endian
    namespace: str = ""
    answered: int = 0
    trace: dict[str, str] | None = None
    lora: str = ""
    expected_tokens: int = 0
    call: HttpCall | None = None
    max_tokens: int = 1
    rank: int = 0
    shared_tokens: int = 0
    order_s: float = 0.0
    waited_s: float = 0.0
    keep: Keep | None = None


class Cancel(Struct, array_like=True):
    stream: int


class Preparing(Struct, array_like=True):
    """The replica's loop prepares the request of this stream (TAKEN), or has done so (PREPARED)."""

    stream: int


class Call(Struct, array_like=True):
    """A question with one answer: Reply, or Ended."""

    stream: int
    method: str
    body: bytes
    rank: int = 0  # that is asked


class Reply(Struct, array_like=True):
    stream: int
    body: bytes


class Ended(Struct, array_like=True, gc=False):
    stream: int
    outcome: Outcome
    message: str = ""


class Pending(Struct, array_like=True):
    """What a replica has to compute, for routers that do not hear of each other."""

    tokens: list[Count]  # of each rank: uncached prompt tokens of requests without a first token


class Deltas(Struct, array_like=True):
    """What an engine's step has brought for all streams of one connection."""

    chunks: list[tuple[int, Chunk]]  # stream, its next chunk
    ended: list[Ended]  # after these chunks


encode = msgspec.msgpack.Encoder().encode
decode_challenge = msgspec.msgpack.Decoder(Challenge).decode
decode_proof = msgspec.msgpack.Decoder(Proof).decode
decode_welcome = msgspec.msgpack.Decoder(Welcome).decode
decode_begin = msgspec.msgpack.Decoder(Begin).decode
decode_cancel = msgspec.msgpack.Decoder(Cancel).decode
decode_preparing = msgspec.msgpack.Decoder(Preparing).decode
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_pending = msgspec.msgpack.Decoder(Pending).decode
decode_deltas = msgspec.msgpack.Decoder(Deltas).decode

TOKEN_ID = np.dtype("<u4")


def begin_of(stream: int, request: GenerateRequest) -> Begin:
    return Begin(
        stream,
        request.request_id,
        np.ascontiguousarray(request.token_ids, TOKEN_ID).tobytes(),
        request.namespace,
        request.answered,
        None if request.trace is None else dict(request.trace),
        request.lora,
        request.expected_tokens,
        request.call,
        request.max_tokens,
        request.rank,
        request.shared_tokens,
        request.order_s,
        request.waited_s,
        request.keep,
    )


def request_in(packed: bytes) -> GenerateRequest:
    """Of an encoded Begin. ValueError when it cannot be read."""
    return request_of(decode_begin(packed))


def request_of(begin: Begin) -> GenerateRequest:
    """Raises ValueError for token ids that are none."""
    return GenerateRequest(
        begin.request_id,
        token_ids_of(begin.token_ids),
        begin.namespace,
        begin.answered,
        begin.trace,
        begin.lora,
        expected_tokens=begin.expected_tokens,
        call=begin.call,
        max_tokens=begin.max_tokens,
        rank=begin.rank,
        shared_tokens=begin.shared_tokens,
        order_s=bounded(begin.order_s),
        waited_s=max(0.0, bounded(begin.waited_s)),
        keep=begin.keep,
    )


def bounded(given_s: float) -> float:
    """A time that a replica can count with; 0 for what is no number of seconds."""
    if not math.isfinite(given_s):
        return 0.0
    return max(-MOST_ORDER_S, min(MOST_ORDER_S, given_s))


def token_ids_of(packed: bytes) -> TokenIds:
    return np.frombuffer(packed, TOKEN_ID).astype(np.uint32, copy=False)
