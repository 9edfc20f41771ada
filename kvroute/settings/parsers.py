"""Parsers for the values of options.

Values from the command line or the environment are text. Values from --models are already parsed
from JSON, so some parsers return them unchanged.
"""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic_core import PydanticCustomError

CLUSTER = re.compile(r"[\w.-]{1,100}")  # the form of a cluster's id
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,]+")  # the form of a browser's Origin header


def absolute(path: Path | None) -> Path | None:
    """Make a path absolute, since routers and replicas run in other working folders."""
    return path and path.absolute()


def cluster_name(name: str | None) -> str | None:
    """Check the id of a cluster."""
    if name is not None and not CLUSTER.fullmatch(name):
        raise PydanticCustomError(
            "cluster", "expected 1 to 100 letters, digits and the characters . _ -"
        )
    return name


def listed(value: object) -> object:
    """Split a comma-separated string; return any other value unchanged."""
    return value.split(",") if isinstance(value, str) else value


def origins(value: list[str]) -> list[str]:
    """Normalise origins to the form that browsers send; keep `*` unchanged."""
    cleaned = [origin.strip().lower().removesuffix("/") for origin in value]
    for origin in cleaned:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise PydanticCustomError("origin", "expected SCHEME://HOST or SCHEME://HOST:PORT")
    return [_without_default_port(origin) for origin in cleaned]


def _without_default_port(origin: str) -> str:
    scheme, _, _ = origin.partition("://")
    return origin.removesuffix({"http": ":80", "https": ":443"}.get(scheme, ""))


def absolute_folders(adapters: list[str]) -> list[str]:
    """Make the path in each NAME=PATH absolute."""
    pairs = (adapter.partition("=") for adapter in adapters)
    return [f"{name}={Path(path).absolute()}" if path else name for name, _, path in pairs]


def joined(names: object) -> object:
    """Join the values of a repeated `--model` with commas; return a string unchanged."""
    return ",".join(names) if isinstance(names, list) else names


def from_json(value: object) -> object:
    """Parse a JSON string; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise PydanticCustomError("json", "expected JSON ({why})", {"why": str(error)}) from None


def engine_args(arguments: object) -> object:
    """Merge JSON objects and name=value pairs into one mapping; pairs have priority."""
    objects, pairs = dict[str, Any](), dict[str, Any]()
    for argument in arguments if isinstance(arguments, list) else [arguments]:
        if isinstance(argument, str) and not argument.lstrip().startswith("{"):
            name, value = _pair(argument)
            pairs[name] = value
            continue
        parsed = from_json(argument)
        if not isinstance(parsed, dict):
            raise _engine_arg_error()
        objects |= parsed
    return {str(name).replace("-", "_"): value for name, value in (objects | pairs).items()}


def _pair(text: str) -> tuple[str, Any]:
    """Parse name=value; a value that is not JSON is used as a string."""
    name, equals, value = text.partition("=")
    if not (name.strip() and equals):
        raise _engine_arg_error()
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value


def _engine_arg_error() -> PydanticCustomError:
    return PydanticCustomError("engine_args", "expected a JSON object or name=value")


def number_as_text(value: object) -> object:
    """Return a number, as YAML and JSON have it, as text; return any other value unchanged."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


def checked_size(value: str) -> str:
    """Check a size: a number of GB, or a percentage of the node's memory."""
    try:
        size_bytes(value, of_bytes=0)
    except ValueError:
        raise PydanticCustomError(
            "size",
            "expected GB, such as 64, or a percentage of the node's memory, such as 30%",
        ) from None
    return value


def size_bytes(value: str, *, of_bytes: int) -> int:
    """Convert a number of GB, or a percentage of `of_bytes`, to bytes.

    Raises ValueError for any other text.
    """
    number, percent = float(value.removesuffix("%")), value.endswith("%")
    if not 0 <= number <= (100 if percent else 1e6):
        raise ValueError(value)
    return int(number / 100 * of_bytes) if percent else int(number * 1e9)


def checked_ports(value: str) -> str:
    """Check a range of ports: FIRST-LAST, one port, or the empty string."""
    try:
        ports(value)
    except ValueError:
        raise PydanticCustomError(
            "ports", "expected FIRST-LAST with ports from 1 to 65535, such as 20000-20999"
        ) from None
    return value


def checked_urls(values: list[str]) -> list[str]:
    """Check the URLs of servers, and return each once, without a slash at its end.

    Each value can have several URLs, separated by commas.
    """
    urls = [*dict.fromkeys(url.rstrip("/") for url in _separated(values))]
    if not all(map(_is_server, urls)):
        raise PydanticCustomError(
            "urls", "expected http://HOST:PORT or https://HOST:PORT, without a path"
        )
    return urls


def names_with_ports(values: list[str]) -> list[str]:
    """Check values of the form NAME:PORT, each of which can be several, separated by commas."""
    names = [*dict.fromkeys(_separated(values))]
    if not all(map(_is_name_with_port, names)):
        raise PydanticCustomError("names", "expected NAME:PORT, without http:// before it")
    return names


def _separated(values: list[str]) -> list[str]:
    """Return the parts of values, each of which can have several, separated by commas."""
    return [part.strip() for part in ",".join(values).split(",")] if values else []


def _is_name_with_port(name: str) -> bool:
    url = f"http://{name}"
    return "/" not in name and _is_server(url) and urlsplit(url).port is not None


def _is_server(url: str) -> bool:
    try:
        address = urlsplit(url)
        has_host = bool(address.hostname) and address.port != 0
    except ValueError:  # a port above 65535, for example
        return False
    return has_host and address.scheme in ("http", "https") and not address.path


def ports(value: str) -> range:
    """Parse FIRST-LAST or one port. The empty string means port 0, that is, any free port.

    Raises ValueError for any other text.
    """
    first, _, last = (value or "0").partition("-")
    parsed = range(int(first), int(last or first) + 1)
    if not parsed or (value and not 1 <= parsed[0] <= parsed[-1] <= 65535):
        raise ValueError(value)
    return parsed
