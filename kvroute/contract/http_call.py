"""A client's HTTP request that a replica answers, and the parts of its response."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from kvroute.blocks.fingerprint import Feature


class HttpCall(Struct, frozen=True, array_like=True):
    """The client's HTTP request, for the replica's HTTP application.

    If another replica has answered part of it, the fields from `deltas` to `written_tokens`
    describe that part. The application replays it without sending it, and continues after it.
    """

    path: str
    body: bytes  # JSON
    created: float  # date of the response in Unix time, equal on every replica
    is_rendered: bool = True  # True: the token ids are the prompt; else the replica renders it
    is_checked: bool = False  # True: the replica also renders the body, and compares the token ids
    deltas: tuple[int, ...] = ()  # number of tokens in each output of the first replica's engine
    cached_tokens: int = 0  # prompt tokens that the first replica had in its KV cache
    written_tokens: int = 0  # prompt tokens that the first replica wrote to its KV cache
    problem: str = ""  # why the router could not render the body; empty: it has rendered the body
    request_id: str = ""  # the client's request id, for calls without a GenerateRequest
    namespace: str = ""  # the cache salt, for calls without a GenerateRequest
    is_stored: bool = False  # value of `store` in the response object
    has_prefix: bool = False  # whether the token ids begin with a prefix that the body lacks


class HttpPart(Struct, frozen=True, array_like=True):
    """The part of the HTTP response that the application made from exactly one chunk's tokens."""

    data: bytes  # bytes of the response's body
    status: int = 0  # HTTP status; 0: another part of the response has it
    content_type: str = ""
    deltas: tuple[int, ...] = ()  # number of tokens in each of the engine's outputs
    written_tokens: int = 0  # prompt tokens that the engine wrote to its KV cache
    can_continue: bool = True  # whether another replica can continue exactly after this part
    # Whether this is the whole response, which arrived at its end: when the first token was
    # generated is unknown.
    is_whole: bool = False


class Rendered(Struct, frozen=True, array_like=True):
    """The prompts that the application renders from a body, or its refusal of the body."""

    token_ids: bytes = b""  # the first prompt's token ids, 4 little-endian bytes each
    is_text: bool = True  # the token ids are the whole prompt; False if it has images, for example
    refusal: HttpPart | None = None  # the response that refuses the body
    features: tuple[Feature, ...] = ()  # images and other media, sorted by offset
    more: tuple["Rendered", ...] = ()  # the body's other prompts, in order


def joined_parts(parts: Sequence[HttpPart]) -> HttpPart:
    """Join consecutive parts of one response into one part."""
    head = next((part for part in parts if part.status), parts[0])
    return HttpPart(
        b"".join([part.data for part in parts]),
        head.status,
        head.content_type,
        tuple([tokens for part in parts for tokens in part.deltas]),
        parts[0].written_tokens,
        all(part.can_continue for part in parts),
        parts[0].is_whole,
    )


# These are functions, since the replica's deployment is pickled by value, and msgspec's decoders
# cannot be pickled. The functions that decode raise one of unreadable.DECODE_ERRORS.


def encode_call(call: HttpCall) -> bytes:
    return msgspec.msgpack.encode(call)


def decode_call(packed: bytes) -> HttpCall:
    return msgspec.msgpack.decode(packed, type=HttpCall)


def encode_part(part: HttpPart) -> bytes:
    return msgspec.msgpack.encode(part)


def decode_part(packed: bytes) -> HttpPart:
    return msgspec.msgpack.decode(packed, type=HttpPart)


def encode_rendered(rendered: Rendered) -> bytes:
    return msgspec.msgpack.encode(rendered)


def decode_rendered(packed: bytes) -> Rendered:
    return msgspec.msgpack.decode(packed, type=Rendered)
