"""The messages between a router and a replica, as typed values in msgpack.

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

VERSION = 2
NONCE_BYTES = 16
MOST_ORDER_S = 1e6  # limit of times in both directions, in seconds: longer than any request waits

# How a request ends. refused: the replica runs as many requests as it may, or is stopping. invalid:
# the request can never run. dead: the engine has died. failed: any other error.
Outcome = Literal["done", "refused", "invalid", "dead", "failed"]


class Challenge(Struct, array_like=True):
    """The replica's first message."""

    version: int
    nonce: bytes


class Proof(Struct, array_like=True):
    """The router's proof that it knows the secret, and its challenge to the replica."""

    version: int
    proof: bytes
    nonce: bytes


class Welcome(Struct, array_like=True):
    """The replica's proof that it knows the secret."""

    proof: bytes


class Begin(Struct, array_like=True):
    """Starts a stream of chunks. The fields are those of GenerateRequest."""

    stream: int  # the stream's number on this connection
    request_id: str
    token_ids: bytes  # 4 bytes each, little endian
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
    """The replica begins (TAKEN) or has finished (PREPARED) the preparation of a request."""

    stream: int


class Call(Struct, array_like=True):
    """A call of a method of the replica; the answer is Reply, or Ended after an error."""

    stream: int
    method: str
    body: bytes
    rank: int = 0  # the rank whose method is called


class Reply(Struct, array_like=True):
    stream: int
    body: bytes


class Ended(Struct, array_like=True, gc=False):
    stream: int
    outcome: Outcome
    message: str = ""


class Pending(Struct, array_like=True):
    """A replica's report of its backlog, for routers that do not get each other's messages."""

    tokens: list[Count]  # for each rank, uncached prompt tokens of requests without a first token


class Deltas(Struct, array_like=True):
    """The output of one engine step for all streams of a connection."""

    chunks: list[tuple[int, Chunk]]  # number of a stream, and its next chunk
    ended: list[Ended]  # streams that end after these chunks


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
    """Decode an encoded Begin. Raises ValueError if it cannot be read."""
    return request_of(decode_begin(packed))


def request_of(begin: Begin) -> GenerateRequest:
    """Return the request of a Begin. Raises ValueError for invalid token ids."""
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
    """Limit a time to MOST_ORDER_S in both directions; 0 for infinity and NaN."""
    if not math.isfinite(given_s):
        return 0.0
    return max(-MOST_ORDER_S, min(MOST_ORDER_S, given_s))


def token_ids_of(packed: bytes) -> TokenIds:
    return np.frombuffer(packed, TOKEN_ID).astype(np.uint32, copy=False)
