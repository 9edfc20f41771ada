"""Parsers turn what a user writes for an option into its value."""

import json
import re
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError

MOST_SESSIONS = 1_000_000
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,]+")


def absolute(path: Path | None) -> Path | None:
    """An absolute path: routers run in other folders."""
    return path and path.absolute()


def listed(given: object) -> object:
    """Splits the comma-separated string of an environment variable."""
    return given.split(",") if isinstance(given, str) else given


def origins(given: list[str]) -> list[str]:
    """Origins as browsers write them, or `*`."""
    found = [each.strip().lower().removesuffix("/") for each in given]
    for each in found:
        if each != "*" and not ORIGIN.fullmatch(each):
            raise PydanticCustomError("origin", "expected SCHEME://HOST or SCHEME://HOST:PORT")
    return [_without_default_port(each) for each in found]


def _without_default_port(origin: str) -> str:
    scheme, _, _ = origin.partition("://")
    return origin.removesuffix({"http": ":80", "https": ":443"}.get(scheme, ""))


def absolute_folders(adapters: list[str]) -> list[str]:
    pairs = (each.partition("=") for each in adapters)
    return [f"{name}={Path(path).absolute()}" if path else name for name, _, path in pairs]


def joined(names: object) -> object:
    """Joins the values of a repeated `--model`."""
    return ",".join(names) if isinstance(names, list) else names


def from_json(given: object) -> object:
    """The value of a JSON string; any other value unchanged."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        raise PydanticCustomError("json", "expected JSON ({why})", {"why": str(error)}) from None


def engine_args(given: object) -> object:
    """One mapping of all JSON objects and name=value pairs; a pair wins over an object."""
    objects, pairs = dict[str, Any](), dict[str, Any]()
    for each in given if isinstance(given, list) else [given]:
        if isinstance(each, str) and not each.lstrip().startswith("{"):
            name, value = _pair(each)
            pairs[name] = value
            continue
        found = from_json(each)
        if not isinstance(found, dict):
            raise _no_engine_arg()
        objects |= found
    return {str(name).replace("-", "_"): value for name, value in (objects | pairs).items()}


def _pair(text: str) -> tuple[str, Any]:
    """Parses name=value. The value is parsed as JSON if possible, else it is a string."""
    name, equals, value = text.partition("=")
    if not (name.strip() and equals):
        raise _no_engine_arg()
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value


def _no_engine_arg() -> PydanticCustomError:
    return PydanticCustomError("engine_args", "expected a JSON object or name=value")


def checked_size(given: str) -> str:
    """GB, or a share of memory that ends with %."""
    try:
        size_bytes(given, of_bytes=0)
    except ValueError:
        raise PydanticCustomError(
            "size", "expected GB, such as 64, or a share of the node's memory, such as 30%"
        ) from None
    return given


def size_bytes(given: str, *, of_bytes: int) -> int:
    """Bytes of GB, or of a share of `of_bytes`. ValueError for anything else."""
    number, percent = float(given.removesuffix("%")), given.endswith("%")
    if not 0 <= number <= (100 if percent else 1e6):
        raise ValueError(given)
    return int(number / 100 * of_bytes) if percent else int(number * 1e9)


def session_limit(given: object) -> object:
    """Return auto, off, or a number of sessions that is at least 1."""
    if given in ("auto", "off"):
        return given
    text = str(given)
    if text.isdecimal() and 1 <= int(text[:10]) <= MOST_SESSIONS:
        return int(text)
    raise PydanticCustomError(
        "sessions", f"expected auto, off, or a number of sessions from 1 to {MOST_SESSIONS:,}"
    )


def checked_ports(given: str) -> str:
    """FIRST-LAST, one port, or nothing."""
    try:
        ports(given)
    except ValueError:
        raise PydanticCustomError(
            "ports", "expected FIRST-LAST of 1 to 65535, such as 20000-20999"
        ) from None
    return given


def ports(given: str) -> range:
    """The ports of FIRST-LAST or of one number; port 0, which is any, of nothing. ValueError for
    anything else."""
    first, _, last = (given or "0").partition("-")
    found = range(int(first), int(last or first) + 1)
    if not found or (given and not 1 <= found[0] <= found[-1] <= 65535):
        raise ValueError(given)
    return found
