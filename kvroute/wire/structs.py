"""The messages between a router and a replica, as typed values in msgpack.

A new field needs a default and leaves VERSION unchanged. VERSION rises when an older process would
misunderstand a message.
"""

import math
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import astuple, replace

from kvroute.contract.generation import Chunk, GenerateRequest, TokenIds
from kvroute.contract.records import Count

VERSION = 3
NONCE_BYTES = 16
MAX_ORDER_S = 1e6  # limit of times in both directions, in seconds: longer than any request waits

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


class Cancel(Struct, array_like=True):
    stream: int


class Preparing(Struct, array_like=True):
    """The replica begins (TAKEN) or has finished (PREPARED) the preparation of a request."""

    stream: int


class MethodCall(Struct, array_like=True):
    """A call of a method of the replica; the answer is Reply, or Ended after an error."""

    stream: int
    method: str
    body: bytes
    rank: int = 0  # the rank whose method is called


class MethodReply(Struct, array_like=True):
    stream: int
    body: bytes


class StreamEnded(Struct, array_like=True, gc=False):
    stream: int
    outcome: Outcome
    message: str = ""


class Pending(Struct, array_like=True):
    """A replica's report of its backlog, for routers that do not get each other's messages."""

    tokens: list[Count]  # for each rank, uncached prompt tokens of requests without a first token


class Deltas(Struct, array_like=True):
    """The output of one engine step for all streams of a connection."""

    chunks: list[tuple[int, Chunk]]  # number of a stream, and its next chunk
    ended: list[StreamEnded]  # streams that end after these chunks


encode = msgspec.msgpack.Encoder().encode
decode_challenge = msgspec.msgpack.Decoder(Challenge).decode
decode_proof = msgspec.msgpack.Decoder(Proof).decode
decode_welcome = msgspec.msgpack.Decoder(Welcome).decode
_decode_begin = msgspec.msgpack.Decoder(tuple[Any, ...]).decode
decode_cancel = msgspec.msgpack.Decoder(Cancel).decode
decode_preparing = msgspec.msgpack.Decoder(Preparing).decode
decode_call = msgspec.msgpack.Decoder(MethodCall).decode
decode_reply = msgspec.msgpack.Decoder(MethodReply).decode
decode_pending = msgspec.msgpack.Decoder(Pending).decode
decode_deltas = msgspec.msgpack.Decoder(Deltas).decode

TOKEN_ID = np.dtype("<u4")
SENT_FIELDS = GenerateRequest.__struct_fields__.index("pin")


def encode_begin(stream: int, request: GenerateRequest) -> bytes:
    """Encode the message that starts a stream: its number on the connection, then the request."""
    token_ids = np.ascontiguousarray(request.token_ids, TOKEN_ID).tobytes()
    request_id, _, *others = astuple(request)[:SENT_FIELDS]
    return encode((stream, request_id, token_ids, *others))


def decode_begin(packed: bytes) -> tuple[int, GenerateRequest]:
    """Decode what `encode_begin` returns.

    Raises:
        ValueError: it cannot be read.
    """
    stream, *fields = _decode_begin(packed)
    request = msgspec.convert(fields[:SENT_FIELDS], GenerateRequest, dec_hook=_token_ids)
    return stream, replace(
        request,
        order_s=bounded(request.order_s),
        waited_s=max(0.0, bounded(request.waited_s)),
    )


def bounded(given_s: float) -> float:
    """Limit a time to MAX_ORDER_S in both directions; 0 for infinity and NaN."""
    if not math.isfinite(given_s):
        return 0.0
    return max(-MAX_ORDER_S, min(MAX_ORDER_S, given_s))


def token_ids_of(packed: bytes) -> TokenIds:
    return np.frombuffer(packed, TOKEN_ID).astype(np.uint32, copy=False)


def _token_ids(_: type, packed: bytes) -> TokenIds:
    return token_ids_of(packed)
