"""The id by which clients name a prefix."""

from typing import Annotated

from pydantic import BeforeValidator, Field


def _name(value: object) -> object:
    """The number 1 and the string "1" name the same prefix."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


OF = "␟"  # between a tenant and the name of a prefix of its own; clients' names have none

PrefixId = Annotated[
    str,
    BeforeValidator(_name),
    Field(min_length=1, max_length=128, pattern=f"^[^{OF}]+$"),
]
