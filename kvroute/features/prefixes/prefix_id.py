"""The id of a named prefix, that is, of a declared text that replicas keep cached."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from kvroute.contract.own_names import TENANT_SEPARATOR


def _number_to_text(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


PrefixId = Annotated[
    str,
    BeforeValidator(_number_to_text),  # the number 1 and the string "1" are the same id
    Field(min_length=1, max_length=128, pattern=f"^[^{TENANT_SEPARATOR}]+$"),
]
