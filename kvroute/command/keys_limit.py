"""What `kvroute keys limit` was told, as limits of a tenant."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvroute.client import fail
from kvroute.keys.key_file import TENANT
from kvroute.keys.limits import ANY, TenantLimits

NONE = "none"  # a value that takes a limit away
NAMES = {field: f"--{field.replace('_', '-')}" for field in TenantLimits.__struct_fields__}
NAMES["adapters"] = "--adapter"


def check_tenant(given: str) -> None:
    if given != ANY and not re.match(TENANT, given):
        fail(f"TENANT is {given[:80]!r}; expected a tenant's name, or '{ANY}' for all others")


def changed(before: TenantLimits, given: Mapping[str, Any]) -> TenantLimits:
    """The limits with those that were given; a value of None was not."""
    values = {name: _value(name, each) for name, each in given.items() if each is not None}
    if not values:
        fail(f"no limit was given; expected one of {', '.join(NAMES.values())}")
    fields = msgspec.structs.asdict(before) | values
    try:
        found = msgspec.convert(fields, TenantLimits)
    except msgspec.ValidationError as error:
        fail(f"{', '.join(NAMES[name] for name in values)}: {error}")
    return found


def shown(limits: TenantLimits) -> str:
    """As the command's options."""
    fields = msgspec.structs.asdict(limits)
    given = [_shown(name, value) for name, value in fields.items() if value is not None]
    return " ".join(given) or "no limits"


def _shown(name: str, value: int | Sequence[str]) -> str:
    if isinstance(value, int):
        return f"{NAMES[name]} {value}"
    return " ".join(f"{NAMES[name]} {each}" for each in value) or f"{NAMES[name]} ''"


def _value(name: str, given: str | Sequence[str]) -> object:
    if not isinstance(given, str):
        named = [each for each in given if each]
        return None if named == [NONE] else named
    if given == NONE:
        return None
    if not (given.isascii() and given.isdigit()):
        fail(f"{NAMES[name]} is {given[:80]!r}; expected a whole number, or {NONE}")
    return int(given)
