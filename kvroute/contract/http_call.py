"""A client's HTTP request that a replica answers, and the parts of its response."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from kvroute.blocks.fingerprint import MediaSpan

PART_BYTES = 256 << 10  # largest part of an uploaded body that is in memory or on its way at once


class Upload(Struct, frozen=True, array_like=True):
    """A body that the replica has got in parts before the request, such as a form with a file."""

    id: str  # the parts have the same id
    size: int  # bytes of the body
    content_type: str
    # A hash of the form's fields and file. It is equal if a client sends the same form again.
    digest: bytes
    path: str = ""  # the file with the body in the replica's process; routers leave it empty


class HttpCall(Struct, frozen=True, array_like=True):
    """The client's HTTP request, for the replica's HTTP application.

    To render a body is to convert it to the prompt's token ids. If another replica has answered
    part of the request, the fields from `deltas` to `written_tokens`, and `text_chars`, describe
    that part. The application produces that part again without sending it, and continues after it.
    """

    path: str
    body: bytes  # JSON; empty if the body is in `upload`
    created: float  # Unix time in the response; equal on every replica that continues it
    is_rendered: bool = True  # True: the router has rendered the body; else the replica does
    is_checked: bool = False  # True: the replica also renders the body, and compares the results
    deltas: tuple[int, ...] = ()  # number of tokens in each output of the first replica's engine
    cached_tokens: int = 0  # prompt tokens that the first replica had in its KV cache
    written_tokens: int = 0  # prompt tokens that the first replica wrote to its KV cache
    problem: str = ""  # why the router has not rendered the body, for the replica's log
    request_id: str = ""  # the client's request id, for calls without a GenerateRequest
    namespace: str = ""  # the cache salt, for calls without a GenerateRequest
    is_stored: bool = False  # value of `store` in the response object
    has_prefix: bool = False  # True: the token ids begin with an opening that the body lacks
    variant: str = ""  # the variant of the model that the body asks for; see Scope
    features: dict[str, bytes] = {}  # name of a feature -> its data for its side in the replica
    upload: Upload | None = None  # the body, if the replica gets it in parts before the request
    # Characters of the answer that an attached server has sent; -1: no such server has begun it.
    text_chars: int = -1


# A value of HttpCall.problem: no replica is in the index, for example because Redis was emptied.
NO_RECORD = "the router does not know the replicas' chat template yet"


class HttpPart(Struct, frozen=True, array_like=True, gc=False):
    """The part of the HTTP response that the application made from exactly one chunk's tokens."""

    data: bytes  # bytes of the response's body
    status: int = 0  # HTTP status; 0: another part of the response has it
    content_type: str = ""
    deltas: tuple[int, ...] = ()  # number of tokens in each of the engine's outputs
    written_tokens: int = 0  # prompt tokens that the engine wrote to its KV cache
    can_continue: bool = True  # whether another replica can continue exactly after this part
    # True: the engine delivered the whole response at its end, so the time of its first token is
    # unknown.
    is_whole: bool = False
    # Unix time in the response of an attached server, which sets it itself; 0: that of the call.
    created: int = 0
    text_chars: int = 0  # characters of the answer in `data`, if `created` is set


class Rendered(Struct, frozen=True, array_like=True):
    """The prompts that the application renders from a body, or its refusal of the body."""

    token_ids: bytes = b""  # the first prompt's token ids, 4 little-endian bytes each
    is_text: bool = True  # the token ids are the whole prompt; False if it has images, for example
    refusal: HttpPart | None = None  # the response that refuses the body
    media: tuple[MediaSpan, ...] = ()  # images and other media, sorted by offset
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
        max(part.created for part in parts),
        sum(part.text_chars for part in parts),
    )


# These functions replace msgspec's decoder objects: Ray pickles the replica's deployment by value,
# and decoders cannot be pickled. A function that decodes raises one of unreadable.DECODE_ERRORS.


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
