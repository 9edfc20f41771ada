"""The messages between a router and a replica, as typed values in msgpack.

A stream is the answer to a request, or to a call of a method. The router numbers the streams of
each connection.

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

VERSION = 4  # version of the protocol
NONCE_BYTES = 16  # size of the nonce: random bytes that the other end's proof must include
MAX_ORDER_S = 1e6  # limit of received times in seconds, also of negative ones; no wait is so long

# How a request ends. refused: the replica runs its maximum number of requests, or is stopping, or
# its engine has not begun with the request. invalid: no replica can run the request. dead: the
# engine has died. failed: any other error.
Outcome = Literal["done", "refused", "invalid", "dead", "failed"]


class Challenge(Struct, array_like=True):
    """The replica's first message: the router must prove that it knows the secret."""

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
    """The router cancels the request or the method call that has this stream."""

    stream: int


class Preparing(Struct, array_like=True):
    """The replica begins (TAKEN) or has ended (PREPARED) the preparation of a request.

    If the replica dies in between, the request may be the cause.
    """

    stream: int


class MethodCall(Struct, array_like=True):
    """A call of a replica's method. The answer is MethodReply, or StreamEnded after an error."""

    stream: int
    method: str
    body: bytes
    rank: int = 0  # number of the data parallel rank that the call is for


class MethodReply(Struct, array_like=True):
    """The answer to a MethodCall."""

    stream: int
    body: bytes


class StreamEnded(Struct, array_like=True, gc=False):
    """The end of a request, or of a method call that failed."""

    stream: int
    outcome: Outcome
    message: str = ""


class Pending(Struct, array_like=True):
    """A replica's report of the prompt tokens that it still has to compute.

    Routers use it while they get no messages from other routers, whose requests they then miss.
    """

    # For each rank: uncached prompt tokens of the requests that have no first token yet.
    tokens: list[Count]


class Away(Struct, array_like=True):
    """Why the replica's engine can run no requests now; empty: it can."""

    reason: str


class Deltas(Struct, array_like=True):
    """The output of one engine step for all streams of a connection."""

    chunks: list[tuple[int, Chunk]]  # pairs of a stream's number and its next chunk
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
decode_away = msgspec.msgpack.Decoder(Away).decode
decode_deltas = msgspec.msgpack.Decoder(Deltas).decode

TOKEN_ID = np.dtype("<u4")
# Routers send only the fields of a GenerateRequest before `pin`; this is their number.
SENT_FIELDS = GenerateRequest.__struct_fields__.index("pin")


def encode_begin(stream: int, request: GenerateRequest) -> bytes:
    """Encode the message BEGIN: the stream's number on the connection, then the request."""
    token_ids = np.ascontiguousarray(request.token_ids, TOKEN_ID).tobytes()
    request_id, _, *others = astuple(request)[:SENT_FIELDS]
    return encode((stream, request_id, token_ids, *others))


def decode_begin(packed: bytes) -> tuple[int, GenerateRequest]:
    """Decode the message BEGIN: the stream's number, and the request.

    Raises:
        ValueError: the message is not valid.
    """
    stream, *fields = _decode_begin(packed)
    request = msgspec.convert(fields[:SENT_FIELDS], GenerateRequest, dec_hook=_token_ids)
    return stream, replace(
        request,
        order_s=bounded(request.order_s),
        waited_s=max(0.0, bounded(request.waited_s)),
    )


def bounded(time_s: float) -> float:
    """Limit a time to -MAX_ORDER_S to MAX_ORDER_S; return 0 for infinity and NaN."""
    if not math.isfinite(time_s):
        return 0.0
    return max(-MAX_ORDER_S, min(MAX_ORDER_S, time_s))


def token_ids_of(packed: bytes) -> TokenIds:
    return np.frombuffer(packed, TOKEN_ID).astype(np.uint32, copy=False)


def _token_ids(_: type, packed: bytes) -> TokenIds:
    return token_ids_of(packed)
