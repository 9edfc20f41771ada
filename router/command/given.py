"""What people write for a setting, on the command line or in the environment, becomes its value."""

import json
from pathlib import Path

from pydantic_core import PydanticCustomError


def absolute(path: Path | None) -> Path | None:
    """Routers run in folders of their own."""
    return path and path.absolute()


def listed(given: object) -> object:
    """The environment has one string for all."""
    return given.split(",") if isinstance(given, str) else given


def absolute_folders(adapters: list[str]) -> list[str]:
    pairs = (each.partition("=") for each in adapters)
    return [f"{name}={Path(path).absolute()}" if path else name for name, _, path in pairs]


def joined(names: object) -> object:
    """`--model` may be given several times."""
    return ",".join(names) if isinstance(names, list) else names


def from_json(given: object) -> object:
    """A list from the command line or the environment."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        raise PydanticCustomError("json", "expected JSON ({why})", {"why": str(error)}) from None
