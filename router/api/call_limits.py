"""Limits on fields of a body, so that they cannot delay or harm other requests at a replica."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvroute.router.api.chat_message import MAX_MESSAGES
from kvroute.router.api.errors import ApiError, invalid, shown, unsupported

MAX_N = 128  # largest number of choices for one prompt
MAX_CHOICES = 1024  # largest number of choices in one request: prompts times n
# Largest number of JSON values in a body, not counting token ids. A replica's event loop parses
# them.
MAX_VALUES = 100_000
MAX_NAME = 256  # longest name, salt or session id, in characters
# Each prompt of a request gets a copy of the other fields. This is the largest size of all copies
# together, in bytes.
MAX_COPIED = 16 << 20
EMBEDDED = ("input", "texts", "images", "inputs")  # fields with a list of texts to embed
# Fields with a list of texts to score. Each text takes 100 us of a replica's event loop.
SCORED = ("documents", "queries", "items", "data_1", "data_2", "text_1", "text_2")
# Name of a field -> largest number of its items. A replica's event loop checks every stop string
# for each output token, and tokenizes every bad word. vLLM's GPU engines have space for 128 stop
# ids, and for 1024 ids in the last two fields. With more ids, they crash.
MAX_ITEMS = {
    "messages": MAX_MESSAGES,
    **dict.fromkeys((*EMBEDDED, *SCORED), 4096),
    "tools": 1024,
    **dict.fromkeys(("stop", "stop_sequences"), 256),
    **dict.fromkeys(("bad_words", "stop_token_ids"), 128),
    **dict.fromkeys(("allowed_token_ids", "logit_bias"), 1024),
}
# Largest number of members in an object such as metadata. A replica needs 20 us for each invalid
# member.
MAX_KEYS = 4096
LISTED_TEXTS = ("stop", "stop_sequences", "bad_words")  # fields with lists of texts
MAX_TEXT = 16_384  # largest number of characters of all texts in one of LISTED_TEXTS
# Fields that vLLM compiles to a grammar. A replica's event loop needs 6 us for each JSON value, and
# 0.6 us for each character of a structural tag that is sent as a string.
GRAMMARS = ("response_format", "structured_outputs", "text", "output_config", "output_format")
MAX_GRAMMAR_VALUES = 16_384  # largest number of JSON values in all of GRAMMARS and the tools
MAX_GRAMMAR_BYTES = 131_072  # largest size of one of GRAMMARS as JSON, in bytes
# Arguments of transformers' apply_chat_template that are not variables of templates. vLLM accepts
# them in chat_template_kwargs too, where `padding` with `max_length` could make a prompt very long.
TOKENIZER_ARGUMENTS = (
    *("conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)
# Fields of a body with options for the model's processor of images, sound and video. vLLM passes
# them on without a check. With a large value, the processor could enlarge 10 MB to 10 GB.
MEDIA_FIELDS = ("mm_processor_kwargs", "media_io_kwargs")
# Largest value of the options that count pixels. The default of Qwen's processors is 12.8 million.
MAX_PIXELS = 1 << 24
PIXELS = ("min_pixels", "max_pixels", "total_pixels")  # options that count pixels
MAX_EDGE = 4096  # largest length of an edge in pixels, and largest number of frames of a video
# Options that are limited by MAX_EDGE.
EDGES = (
    *("height", "width", "shortest_edge", "longest_edge", "max_length", "sampling_rate"),
    *("num_frames", "max_frames", "min_frames", "max_image_size"),
)
MAX_OTHER = 256.0  # largest value of any other option, such as crops, frames per second and factors
MAX_DEPTH = 4  # deepest nesting of objects and lists in an option

Option = tuple[str, float, float]  # name of an option, its value, the limit


def check_template_kwargs(given: object) -> None:
    """Raise an ApiError if the chat template's variables contain an argument of the tokenizer."""
    for name in TOKENIZER_ARGUMENTS:
        if isinstance(given, dict) and name in given:
            raise unsupported(
                "chat_template_kwargs",
                f"chat_template_kwargs has {name}, an argument of the tokenizer; send variables of "
                "the chat template only",
            )


def check_name(name: str, value: object) -> None:
    """Raise an ApiError if the field is not a string of up to MAX_NAME characters."""
    if value is not None and not (isinstance(value, str) and len(value) <= MAX_NAME):
        raise invalid(
            name, f"{name} is {shown(value)}; expected a string of up to {MAX_NAME} characters"
        )


def check_count(name: str, value: object, limit: int) -> None:
    """Raise an ApiError if the field is a number above the limit."""
    if isinstance(value, int) and value > limit:
        raise invalid(name, f"{name} is {value}; expected a whole number from 1 to {limit}")


def check_lengths(body: Mapping[str, Any], *, has_token_input: bool) -> None:
    """Raise an ApiError if a list or an object in the body has too many items.

    Args:
        has_token_input: whether the field `input` has the token ids of one text.
    """
    for name, items in body.items():
        if isinstance(items, dict):
            limit = MAX_ITEMS.get(name, MAX_KEYS)
        elif (
            isinstance(items, list)
            and name in MAX_ITEMS
            and not (name == "input" and has_token_input)
        ):
            limit = MAX_ITEMS[name]
        else:
            continue
        if len(items) > limit:
            raise invalid(name, f"{name} has {len(items)} items; send {limit} at most")
    for name in LISTED_TEXTS:
        _check_text(name, body.get(name))


def check_grammars(body: Mapping[str, Any]) -> None:
    """Raise an ApiError if grammars or tools would take a replica's event loop too long."""
    given = {name: body[name] for name in GRAMMARS if isinstance(body.get(name), dict)}
    values = values_in([*given.values(), body.get("tools")])
    if values > MAX_GRAMMAR_VALUES:
        names = " and ".join([*given, *(["tools"] if body.get("tools") else [])])
        raise invalid(
            names,
            f"{names} has more than {MAX_GRAMMAR_VALUES} JSON values; send a smaller schema, or "
            "fewer tools",
        )
    for name, value in given.items():
        size = len(msgspec.json.encode(value))
        if size > MAX_GRAMMAR_BYTES:
            raise invalid(
                name, f"{name} has {size} bytes; send a schema of {MAX_GRAMMAR_BYTES} at most"
            )


def _check_text(name: str, texts: object) -> None:
    listed = texts if isinstance(texts, list) else [texts]
    size = sum(len(text) for text in listed if isinstance(text, str))
    if size > MAX_TEXT:
        raise invalid(name, f"{name} has {size} characters; send {MAX_TEXT} at most")


def check_copies(body: Mapping[str, Any], *, prompts: int, body_bytes: int) -> None:
    """Raise an ApiError if the fields next to the prompts are too large to be copied for each one.

    Args:
        prompts: number of prompts in the body.
        body_bytes: size of the whole body.
    """
    if prompts < 2 or prompts * body_bytes <= MAX_COPIED:
        return
    size = len(msgspec.json.encode({**body, "prompt": None, "prompt_embeds": None}))
    if prompts * size > MAX_COPIED:
        raise ApiError(
            413,
            f"the fields next to prompt take {size} bytes, and each of the {prompts} prompts needs "
            f"a copy; the limit is {MAX_COPIED} together. Send fewer prompts at once",
            code="request_too_large",
        )


def values_in(values: Iterable[Any]) -> int:
    """Return the number of JSON values at any depth. Stop counting soon after MAX_VALUES."""
    count = 0
    pending = [values]
    while pending and count <= MAX_VALUES:
        for value in pending.pop():
            count += 1
            if isinstance(value, dict):
                pending.append(value.values())
            elif isinstance(value, list):
                pending.append(value)
    return count


def check_values(body: Mapping[str, Any]) -> None:
    """Raise an ApiError if the body has more JSON values than MAX_VALUES."""
    if values_in(body.values()) > MAX_VALUES:
        raise ApiError(
            413,
            f"the body has more than {MAX_VALUES} JSON values; send fewer",
            code="request_too_large",
        )


def check_media_options(body: Mapping[str, Any]) -> None:
    """Raise an ApiError if a number in MEDIA_FIELDS is larger than any processor needs."""
    for field in MEDIA_FIELDS:
        if isinstance(body.get(field), dict):
            for name, value, limit in _numbers(field, body[field], MAX_DEPTH):
                if not abs(value) <= limit:  # NaN is refused too
                    message = f"{field}: {name} is {shown(value)}; the limit is {limit:,.0f}"
                    raise invalid(field, message)


def _numbers(name: str, value: object, depth: int) -> Iterator[Option]:
    """Yield each number in the value, with the name and the limit of its option.

    If the value is nested too deep, yield its depth as a number that exceeds the limit.

    Args:
        name: name of the option.
        depth: number of further levels that may be nested.
    """
    if depth < 0:
        yield f"the nesting of {name}", MAX_DEPTH + 1, MAX_DEPTH
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(key, item, depth - 1)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _numbers(name, item, depth - 1)
    elif isinstance(value, int | float):
        yield name, value, _limit(name)


def _limit(name: str) -> float:
    if name in PIXELS:
        return MAX_PIXELS
    return MAX_EDGE if name in EDGES else MAX_OTHER
