"""Validates a request's body. An ApiError names the invalid field and what is expected there.

Routers call these functions through bodies.py, so that a large body does not delay other requests.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import pydantic_core
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from kvroute.router.api.errors import ApiError, invalid, shown
from kvroute.settings.help import expectation

Model = TypeVar("Model", bound=BaseModel)
MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
# What clients attach to an object, with the limits of OpenAI's API.
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]
BOM = b"\xef\xbb\xbf"  # UTF-8's byte order mark
_INTEGER, _BOOLEAN = TypeAdapter[int](int), TypeAdapter[bool](bool)
# Field -> type that vLLM converts its value to.
_TYPES: Mapping[str, TypeAdapter[Any]] = {
    **dict.fromkeys(("n", "priority", "prompt_logprobs", "top_logprobs"), _INTEGER),
    **dict.fromkeys(
        ("echo", "store", "background", "return_prompt_text", "enable_response_messages"),
        _BOOLEAN,
    ),
}


def parse(model: type[Model], raw: bytes) -> Model:
    """Return the validated body. Unknown fields are dropped, and null means the default.

    Raises:
        ApiError: 400: the body is not valid.
    """
    given = {name: value for name, value in json_object(raw).items() if value is not None}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _first_error(model, error) from None


def json_object(raw: bytes) -> dict[str, object]:
    """Return the body as a JSON object. It may start with a byte order mark.

    Raises:
        ApiError: 400: the body is not a JSON object.
    """
    try:
        body: object = pydantic_core.from_json(raw.removeprefix(BOM), allow_inf_nan=False)
    except ValueError as error:
        if "recursion limit" in str(error):
            message = "the body is nested too deep; the limit is about 200 levels"
        else:
            message = f"the body is not valid JSON: {error}"
        raise ApiError(400, message, code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(
            400, f"the body is {shown(body)}; expected a JSON object", code="invalid_json"
        )
    return body


def as_utf8(header: str) -> str:
    """Return the value of a header, which the server has decoded as Latin-1, decoded as UTF-8."""
    if not header.isascii():
        with suppress(UnicodeError):
            return header.encode("latin-1").decode()
    return header


def read_as_vllm_does(body: dict[str, Any]) -> None:
    """Convert the values of fields that the router uses, as vLLM converts them.

    vLLM reads `"2"` and `2.0` as the integer 2, and `"no"` as false. Without the same conversion,
    the router could count a different number of choices than the replica, or keep what should not
    be kept. A value that vLLM rejects is left unchanged: the replica answers with vLLM's error.
    """
    for name in _TYPES.keys() & body.keys():
        if body[name] is not None:
            with suppress(ValidationError):
                body[name] = _TYPES[name].validate_python(body[name])


def _first_error(model: type[BaseModel], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"] if not _is_type(part))
    expected = _expected(model, first)
    if first["type"] == "missing":
        return invalid(param, f"{param} is missing; {expected}")
    return invalid(param, f"{param} is {shown(first['input'])}; {expected}")


def _is_type(part: str | int) -> bool:
    """Return whether a part of a location is a type of a union, and not a field or an index."""
    return part == "str" or (isinstance(part, str) and "[" in part)


def _expected(model: type[BaseModel], error: ErrorDetails) -> str:
    """Return what is expected in an invalid field, as the end of an error message.

    It is the field's description. If it has none or is nested, it is the validator's message.
    """
    *parents, name = (part for part in error["loc"] if not _is_type(part))
    field = model.model_fields.get(str(name)) if not parents else None
    if field is not None and field.description is not None:
        return f"expected {field.description}"
    if error["type"] == "model_type":  # pydantic's message would name a class of kvroute
        return "expected an object"
    expected = expectation(error["msg"])
    return expected[:1].lower() + expected[1:]
