"""Asks a server for the prompt of a body that routers do not render themselves."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from kvroute.blocks.fingerprint import MediaSpan
from kvroute.contract.http_call import HttpCall, Rendered
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.replica.attached_engine.server_bodies import CHAT, MESSAGES, RESPONSES
from kvroute.replica.attached_engine.server_client import JSON, ServerClient

BYTES_A_TOKEN = 4  # bytes of a body that count as one token of a prompt that is not known
# Fields that change a prompt, and that /tokenize does not get.
UNSENT_FIELDS = (
    *("add_special_tokens", "continue_final_message", "documents", "truncate_prompt_tokens"),
    *("media_io_kwargs", "mm_processor_kwargs"),
)
TOKENIZE_FIELDS = ("tools", "chat_template_kwargs", "add_generation_prompt", "chat_template")


class UnknownPromptError(Exception):
    """Only the server knows the prompt, and does not tell."""


async def render(server: ServerClient, call: HttpCall) -> Rendered:
    """Return the prompt of a call.

    A server with --enable-scale-out renders all bodies. Other servers tokenise conversations of
    text. For all other bodies the prompt is unknown: only its length is estimated, and it matches
    no other prompt. A body that the server would refuse is not refused here, but when it is sent.
    """
    try:
        if rendered := await _by_render_route(server, call):
            return rendered
        return await _by_tokenize_route(server, call)
    except (UnknownPromptError, *DECODE_ERRORS):
        return unknown_prompt(len(call.body) // BYTES_A_TOKEN)


def unknown_prompt(tokens: int) -> Rendered:
    """Return a prompt of about this many tokens that matches no other prompt."""
    tokens = max(1, tokens)
    never_equal = MediaSpan(secrets.token_hex(16), 0, tokens)
    return Rendered(np.zeros(tokens, "<u4").tobytes(), is_text=False, media=(never_equal,))


async def _by_render_route(server: ServerClient, call: HttpCall) -> Rendered | None:
    """Return the prompt from vLLM's route for rendering; None: the server has no such route."""
    reply = await server.post_body(f"{call.path}/render", call.body, JSON)
    if not reply.is_ok:
        return None
    answer = reply.decoded()
    first, *more = map(_rendered, answer if isinstance(answer, list) else [answer])
    return msgspec.structs.replace(first, more=tuple(more))


def _rendered(prompt: Any) -> Rendered:
    if not isinstance(prompt, dict) or not isinstance(prompt.get("token_ids"), list):
        raise UnknownPromptError
    packed = np.array(prompt["token_ids"], "<u4").tobytes()
    media = sorted(_media(prompt.get("features") or {}), key=lambda image: image.offset)
    return Rendered(packed, is_text=not media, media=tuple(media))


def _media(media: Mapping[str, Any]) -> Iterator[MediaSpan]:
    places = media.get("mm_placeholders") or {}
    for modality, hashes in (media.get("mm_hashes") or {}).items():
        for hash_, place in zip(hashes, places[modality], strict=True):
            yield MediaSpan(str(hash_), int(place["offset"]), int(place["length"]))


async def _by_tokenize_route(server: ServerClient, call: HttpCall) -> Rendered:
    """Return the prompt of a conversation of text. Raises UnknownPromptError."""
    body = msgspec.json.decode(call.body)
    if not isinstance(body, dict) or any(body.get(name) is not None for name in UNSENT_FIELDS):
        raise UnknownPromptError
    question = {name: body[name] for name in TOKENIZE_FIELDS if name in body}
    question |= {"model": body.get("model"), "messages": _messages(call.path, body)}
    reply = await server.post("/tokenize", question)
    if not reply.is_ok:
        raise UnknownPromptError
    return _rendered({"token_ids": reply.decoded().get("tokens")})


def _messages(path: str, body: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a conversation in OpenAI's form. Raises UnknownPromptError."""
    if path == CHAT:
        system, messages = None, body.get("messages")
    elif path == MESSAGES and not body.get("tools"):
        system, messages = body.get("system"), body.get("messages")
    elif path == RESPONSES and not body.get("tools"):
        system, messages = body.get("instructions"), body.get("input")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
    else:
        raise UnknownPromptError
    if not isinstance(messages, list):
        raise UnknownPromptError
    before = [{"role": "system", "content": _text(system)}] if system else []
    return before + [_message(message) for message in messages]


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or message.keys() - {"role", "content", "type"}:
        raise UnknownPromptError
    return {"role": str(message.get("role")), "content": _text(message.get("content"))}


def _text(content: Any) -> str:
    """Return the text of a message's content. Raises UnknownPromptError if it has other parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UnknownPromptError
    return "\n".join(map(_part, content))


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise UnknownPromptError
    return text
