"""Converts the options of `kvroute keys limit` to the limits of a tenant."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvroute.client import fail
from kvroute.keys.key_file import TENANT
from kvroute.keys.limits import ANY, TenantLimits

NONE = "none"  # option value that removes a limit
NAMES = {  # field of TenantLimits -> option
    field: f"--{field.replace('_', '-')}" for field in TenantLimits.__struct_fields__
}
NAMES["adapters"] = "--adapter"


def check_tenant(given: str) -> None:
    if given != ANY and not re.match(TENANT, given):
        fail(f"TENANT is {given[:80]!r}; expected a tenant's name, or '{ANY}' for all others")


def changed(before: TenantLimits, given: Mapping[str, Any]) -> TenantLimits:
    """Return the limits with the options that are not None."""
    values = {name: _value(name, text) for name, text in given.items() if text is not None}
    if not values:
        fail(f"no limit was given; expected one of {', '.join(NAMES.values())}")
    fields = msgspec.structs.asdict(before) | values
    try:
        limits = msgspec.convert(fields, TenantLimits)
    except msgspec.ValidationError as error:
        fail(f"{', '.join(NAMES[name] for name in values)}: {error}")
    return limits


def shown(limits: TenantLimits) -> str:
    """Return the limits as options of the command."""
    fields = msgspec.structs.asdict(limits)
    given = [_shown(name, value) for name, value in fields.items() if value is not None]
    return " ".join(given) or "no limits"


def _shown(name: str, value: int | Sequence[str]) -> str:
    if isinstance(value, int):
        return f"{NAMES[name]} {value}"
    return " ".join(f"{NAMES[name]} {text}" for text in value) or f"{NAMES[name]} ''"


def _value(name: str, given: str | Sequence[str]) -> object:
    if not isinstance(given, str):
        names = [text for text in given if text]
        return None if names == [NONE] else names
    if given == NONE:
        return None
    if not (given.isascii() and given.isdigit()):
        fail(f"{NAMES[name]} is {given[:80]!r}; expected a whole number, or {NONE}")
    return int(given)
