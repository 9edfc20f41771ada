"""The id of a named prefix, as clients send it."""

from typing import Annotated

from pydantic import BeforeValidator, Field


def _name(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


TENANT_SEPARATOR = (
    "␟"  # separates a tenant from its prefix's name; names that clients send cannot have it
)

PrefixId = Annotated[
    str,
    BeforeValidator(_name),  # the number 1 and the string "1" are the same id
    Field(min_length=1, max_length=128, pattern=f"^[^{TENANT_SEPARATOR}]+$"),
]
