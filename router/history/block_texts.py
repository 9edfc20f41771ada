"""The texts of blocks, items and files that vLLM's application cannot read itself."""

import re
from base64 import b64decode
from collections.abc import Iterator, Mapping
from typing import Any

from kvroute.router.api.errors import ApiError, invalid, shown

FAILED = "The tool call failed."  # first line of the result of a tool call that has failed
UNFINISHED = "The tool call did not complete."  # first line of the result of one that was cut off
# Members whose strings are text, in the order in which they are read. `data` is text only in a
# source of the type `text`. A `url` that starts with `data:` is an image.
READ = (
    *("title", "context", "filename", "url", "source", "data", "text", "refusal", "content"),
    *("lines", "stdout", "stderr", "logs", "output", "outputs", "results", "error"),
)
# A file as a data URL with text in it.
TEXT_FILE = re.compile(r"data:(?:text/|application/(?:json|xml|yaml))[^,]*;base64,")


def text_of(value: object) -> str:
    """Return the texts in a block or an item of any type, each on a line of its own."""
    return "\n".join(_texts(value))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for name in READ:
            given = value.get(name)
            is_text = name != "data" or value.get("type") == "text"
            if is_text and not (name == "url" and str(given).startswith("data:")):
                yield from _texts(given)


def text_file(file: Mapping[str, Any], where: str) -> str:
    """Return the name and the text of a file in the body.

    Args:
        where: the place of the file in the body.

    Raises:
        ApiError: it is no text.
    """
    data = file.get("file_data")
    if isinstance(data, str) and (found := TEXT_FILE.match(data)):
        try:
            return text_of([file.get("filename"), b64decode(data[found.end() :]).decode()])
        except ValueError:
            pass
    kind = data.partition(",")[0] if isinstance(data, str) else sorted(file)
    raise invalid(
        where,
        f"{where} is a file of which only {shown(kind)} is known; expected file_data that starts "
        'with "data:text/plain;base64,". Send other files as text or as images',
    )


def unknown_type(where: str, kind: object, expected: tuple[str, ...]) -> ApiError:
    """Return the error for a block or a part of a type that cannot be read."""
    named = "has no type" if kind is None else f"has the type {shown(kind)}"
    return invalid(where, f"{where} {named}; expected {', '.join(expected)}")
