"""Converts options of `kvroute keys limit` to the limits of a tenant, and limits to options."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvroute.client import fail
from kvroute.keys.key_file import TENANT
from kvroute.keys.limits import ANY, TenantLimits

NONE = "none"  # value of an option that removes the limit
NAMES = {  # field of TenantLimits -> option
    field: f"--{field.replace('_', '-')}" for field in TenantLimits.__struct_fields__
}
WORDING = {  # msgspec's wording -> kvroute's
    "Expected": "expected",
    "`int` >= ": "a whole number of at least ",
    "`int` <= ": "a whole number of at most ",
    "`str` of length >= ": "a name whose number of characters is at least ",
    "`str` of length <= ": "a name whose number of characters is at most ",
}
NAMES["adapters"] = "--adapter"


def check_tenant(name: str) -> None:
    """End the command with an error if a tenant cannot have this name."""
    if name != ANY and not re.match(TENANT, name):
        fail(f"TENANT is {name[:80]!r}; expected a tenant's name, or '{ANY}' for all others")


def updated(before: TenantLimits, options: Mapping[str, Any]) -> TenantLimits:
    """Return the limits, changed by the options that the user has set (those that are not None)."""
    values = {name: _value(name, text) for name, text in options.items() if text is not None}
    if not values:
        fail(f"no limit is set; set one of {', '.join(NAMES.values())}")
    for name, value in values.items():
        try:
            msgspec.convert({name: value}, TenantLimits)
        except msgspec.ValidationError as error:
            fail(f"{NAMES[name]} is {_text(options[name])[:80]!r}; {_expected(error)}")
    return msgspec.convert(msgspec.structs.asdict(before) | values, TenantLimits)


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _expected(error: msgspec.ValidationError) -> str:
    """Reword msgspec's message, such as to `expected a whole number of at least 1`."""
    expected = str(error).partition(" - at ")[0]
    for original, wording in WORDING.items():
        expected = expected.replace(original, wording)
    return expected


def as_options(limits: TenantLimits) -> str:
    """Return the limits as they would be set on the command line."""
    fields = msgspec.structs.asdict(limits)
    options = [_option(name, value) for name, value in fields.items() if value is not None]
    return " ".join(options) or "no limits"


def _option(name: str, value: int | Sequence[str]) -> str:
    if isinstance(value, int):
        return f"{NAMES[name]} {value}"
    return " ".join(f"{NAMES[name]} {text}" for text in value) or f"{NAMES[name]} ''"


def _value(name: str, text: str | Sequence[str]) -> object:
    """Parse the value of an option, or the values of --adapter; None removes the limit."""
    if not isinstance(text, str):
        names = [adapter for adapter in text if adapter]
        return None if names == [NONE] else names
    if text == NONE:
        return None
    if not (text.isascii() and text.isdigit()):
        fail(f"{NAMES[name]} is {text[:80]!r}; expected a whole number, or {NONE}")
    return int(text)
