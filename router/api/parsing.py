"""Validates a request's body. An ApiError names the wrong field and the expected value.

Routers call these functions through bodies.py, so that a large body does not delay other requests.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from kvroute.router.api.errors import ApiError, invalid, shown

Model = TypeVar("Model", bound=BaseModel)
BOM = b"\xef\xbb\xbf"  # UTF-8's byte order mark
_WHOLE, _YES_OR_NO = TypeAdapter[int](int), TypeAdapter[bool](bool)
_TYPES: Mapping[str, TypeAdapter[Any]] = {
    **dict.fromkeys(("n", "priority", "prompt_logprobs", "top_logprobs"), _WHOLE),
    **dict.fromkeys(
        ("echo", "store", "background", "return_prompt_text", "enable_response_messages"),
        _YES_OR_NO,
    ),
}


def parse(model: type[Model], raw: bytes) -> Model:
    """Return the validated body; unknown fields are dropped, and null means the default."""
    given = {name: value for name, value in json_object(raw).items() if value is not None}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _first_error(model, error) from None


def json_object(raw: bytes) -> dict[str, object]:
    """Return the body as a JSON object; a byte order mark before it is allowed.

    Raises:
        ApiError: 400, the body is not a JSON object.
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


def read_as_vllm_does(body: dict[str, Any]) -> None:
    """Replace the fields of a body that the router acts on by the values that vLLM reads.

    vLLM reads `"2"` and `2.0` as the whole number 2, and `"no"` as false. If the router did not do
    the same, it could count other choices than the replica, or store a response that the replica
    does not. A value that vLLM rejects stays unchanged, and the replica answers with vLLM's error.
    """
    for name in _TYPES.keys() & body.keys():
        if body[name] is not None:
            with suppress(ValidationError):
                body[name] = _TYPES[name].validate_python(body[name])


def _first_error(model: type[BaseModel], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    expected = _expected(model, first)
    if first["type"] == "missing":
        return invalid(param, f"{param} is missing; {expected}")
    return invalid(param, f"{param} is {shown(first['input'])}; {expected}")


def _expected(model: type[BaseModel], error: ErrorDetails) -> str:
    """Return the field's description, or the validator's message for a nested field."""
    *parents, name = error["loc"]
    field = model.model_fields.get(str(name)) if not parents else None
    if field is not None and field.description is not None:
        return f"expected {field.description}"
    if error["type"] == "model_type":  # pydantic's message names our classes
        return "expected an object"
    return error["msg"][:1].lower() + error["msg"][1:]
