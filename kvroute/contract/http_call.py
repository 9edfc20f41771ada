"""A client's HTTP request that a replica answers, and the parts of its response."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from kvroute.blocks.fingerprint import Feature


class HttpCall(Struct, frozen=True, array_like=True):
    """What the replica's HTTP application gets, next to the prompt's token ids.

    The fields from `deltas` to `written_tokens` say what another replica has answered; the
    application repeats it without sending it, and goes on.
    """

    path: str
    body: bytes  # JSON
    created: float  # date of the response, unix time: the same on every replica
    is_rendered: bool = True  # the token ids are the prompt; else the replica renders the body
    is_checked: bool = False  # the replica also renders the body, and compares
    deltas: tuple[int, ...] = ()  # tokens in each of the engine's outputs
    cached_tokens: int = 0  # prompt tokens from the KV cache, as the first replica found them
    written_tokens: int = 0  # prompt tokens written to the KV cache there
    problem: str = ""  # why the router has not rendered the body
    request_id: str = ""  # the client's, where no GenerateRequest has it
    namespace: str = ""  # the same: its cache salt
    is_stored: bool = False  # value of `store` in the response object


class HttpPart(Struct, frozen=True, array_like=True):
    """What the application made of a chunk's tokens; nothing of it comes earlier or later."""

    data: bytes  # of the response's body
    status: int = 0  # 0: an earlier or a later part has it
    content_type: str = ""
    deltas: tuple[int, ...] = ()  # tokens in each of the engine's outputs
    written_tokens: int = 0
    can_continue: bool = True  # whether another replica can go on exactly behind this part


class Rendered(Struct, frozen=True, array_like=True):
    """The first prompt that the application makes of a body, or its refusal of the body."""

    token_ids: bytes = b""  # 4 bytes each, little endian
    is_text: bool = True  # the token ids are the whole prompt; false with images, for example
    refusal: HttpPart | None = None
    features: tuple[Feature, ...] = ()  # images and other media, sorted by offset
    more: tuple["Rendered", ...] = ()  # the body's other prompts, in order


def joined_parts(parts: Sequence[HttpPart]) -> HttpPart:
    """One part with the content of all."""
    head = next((part for part in parts if part.status), parts[0])
    return HttpPart(
        b"".join([part.data for part in parts]),
        head.status,
        head.content_type,
        tuple([tokens for part in parts for tokens in part.deltas]),
        parts[0].written_tokens,
        all(part.can_continue for part in parts),
    )


# Functions, not decoders: the replica's deployment is pickled by value.


def encode_call(call: HttpCall) -> bytes:
    return msgspec.msgpack.encode(call)


def call_in(packed: bytes) -> HttpCall:
    """Raises one of unreadable.DECODE_ERRORS, as the functions below."""
    return msgspec.msgpack.decode(packed, type=HttpCall)


def encode_part(part: HttpPart) -> bytes:
    return msgspec.msgpack.encode(part)


def part_in(packed: bytes) -> HttpPart:
    return msgspec.msgpack.decode(packed, type=HttpPart)


def encode_rendered(rendered: Rendered) -> bytes:
    return msgspec.msgpack.encode(rendered)


def rendered_in(packed: bytes) -> Rendered:
    return msgspec.msgpack.decode(packed, type=Rendered)
