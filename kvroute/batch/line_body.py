"""The HTTP body with which a line is sent to a cluster."""

import asyncio
from typing import Any
from urllib.request import DataHandler, Request

import httpx
import msgspec

from kvroute.batch.lines import AUDIO, MAX_LINE_BYTES, SentLine

JSON = "application/json"
RESPONSES = "/v1/responses"
ADDRESS = "file_url"  # field of a line with the address of its recording, as in vLLM's run-batch
ESCAPE = b"\\u"  # with it, a field can have another spelling


class BadLineError(ValueError):
    """A line cannot be sent. The message says why."""


async def body_of(line: SentLine, *, downloads: bool) -> tuple[bytes, str]:
    """Return the body of a line's request, and its content type.

    A line has one answer, so it cannot ask for a stream, nor for a response in the background.

    Args:
        downloads: whether recordings may be downloaded. A router must not: a client could let it
            read what only the cluster's network can reach.

    Raises:
        BadLineError: the line has no recording that can be sent.
    """
    if line.url in AUDIO:
        fields = msgspec.json.decode(line.body, type=dict[str, Any])
        name, kind, content = await _recording(fields.pop(ADDRESS, None), downloads=downloads)
        form = httpx.Request(
            "POST", "http://cluster", data=_texts(fields), files={"file": (name, content, kind)}
        )
        return form.read(), form.headers["content-type"]
    raw = bytes(line.body)
    if not any(name in raw for name in (b"stream", b"background", ESCAPE)):
        return raw, JSON
    members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    kept = {
        name: value
        for name, value in members.items()
        if not (name.startswith("stream") or (name == "background" and line.url == RESPONSES))
    }
    return msgspec.json.encode(kept), JSON


async def _recording(address: object, *, downloads: bool) -> tuple[str, str, bytes]:
    """Return the name, the type and the bytes of a recording."""
    scheme = address.partition(":")[0].lower() if isinstance(address, str) else ""
    if scheme not in (("data", "http", "https") if downloads else ("data",)):
        raise BadLineError(
            f"{ADDRESS} is {str(address)[:80]!r}; expected data:audio/wav;base64,..."
            + (" or an http address" if downloads else ". Only kvroute batch run downloads files")
        )
    try:
        if scheme == "data":
            kind, content = await asyncio.to_thread(_decoded, str(address))
        else:
            kind, content = await _downloaded(str(address))
    except (ValueError, OSError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise BadLineError(f"{ADDRESS} cannot be read: {error or type(error).__name__}") from None
    return f"recording.{kind.rpartition('/')[2]}", kind, content


def _decoded(address: str) -> tuple[str, bytes]:
    """Return the type and the content of a data URL. Raises ValueError or OSError."""
    response = DataHandler().data_open(Request(address))
    return response.headers.get_content_type(), response.read()


async def _downloaded(address: str) -> tuple[str, bytes]:
    content = b""
    async with (
        httpx.AsyncClient(follow_redirects=True) as client,
        client.stream("GET", address) as response,
    ):
        response.raise_for_status()
        async for part in response.aiter_bytes():
            content += part
            if len(content) > MAX_LINE_BYTES:
                raise ValueError(f"the file has more than {MAX_LINE_BYTES} bytes")
    kind = response.headers.get("content-type", "").partition(";")[0].strip()
    return kind or "application/octet-stream", content


def _texts(fields: dict[str, Any]) -> dict[str, str | list[str]]:
    """Return the fields of a form with the values of a JSON object."""
    form = dict[str, str | list[str]]()
    for name, value in fields.items():
        if isinstance(value, list):
            form[name if name.endswith("[]") else f"{name}[]"] = [*map(_text, value)]
        elif value is not None:
            form[name] = _text(value)
    return form


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
