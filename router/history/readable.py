"""Makes a call readable for vLLM's application, and says what is left out of it."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import Response
from msgspec import Raw
from msgspec.structs import replace
from pydantic_core import from_json

from kvroute.router.api.calls import (
    CHAT_COMPLETIONS,
    COUNT_TOKENS,
    INPUT_TOKENS,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    Call,
)
from kvroute.router.api.json_members import encode, members
from kvroute.router.history.anthropic_blocks import read_messages
from kvroute.router.history.openai_items import read_chat, read_response
from kvroute.router.history.rewritten import Rewritten

# Header of a response: the types of the tools, blocks and items that are left out of the prompt.
LEFT_OUT = "x-kvroute-left-out"
READERS: Mapping[str, Callable[[Mapping[str, Any]], Rewritten]] = {
    **dict.fromkeys((CHAT_COMPLETIONS, TOKENIZE), read_chat),
    **dict.fromkeys((MESSAGES, COUNT_TOKENS), read_messages),
    **dict.fromkeys((RESPONSES, INPUT_TOKENS), read_response),
}


def header_of(names: Sequence[str]) -> dict[str, str]:
    """Return the header that says that tools, blocks or items of these types are left out."""
    return {LEFT_OUT: ", ".join(names)} if names else {}


def say_left_out(response: Response, names: Sequence[str]) -> None:
    """Add types of tools, blocks or items to the header of a response that names them."""
    said = response.headers.get(LEFT_OUT)
    response.headers.update(header_of([said, *names] if said else names))


def left_out(call: Call) -> list[str]:
    """Return the types of the tools, blocks and items of the call's own body that are left out.

    Raises:
        ApiError: the body has something that cannot be read, and that must not be left out.
    """
    reader = READERS.get(call.path)
    return [*reader(call.body).left_out] if reader else []


def readable(call: Call, *, has_more_messages: bool = False) -> Call:
    """Return the call with a body that vLLM's application can read.

    Args:
        has_more_messages: whether `raw` has earlier turns, which `body` lacks.

    Raises:
        ApiError: the body has something that cannot be read, and that must not be left out.
    """
    if (reader := READERS.get(call.path)) is None:
        return call
    body = call.body
    if has_more_messages:
        body = {**body, "input": from_json(bytes(members(call.raw)["input"]))}
    if not (changed := reader(body).changed):
        return call
    raw = {name: value for name, value in members(call.raw).items() if name not in changed}
    written = {name: value for name, value in changed.items() if value is not None}
    raw |= {name: Raw(json.dumps(written[name], ensure_ascii=False).encode()) for name in written}
    own = changed.keys() - {"input"} if has_more_messages else changed.keys()
    rest = {name: value for name, value in call.body.items() if name not in own}
    new = {name: value for name, value in written.items() if name in own}
    return replace(call, raw=encode(raw), body={**rest, **new})
