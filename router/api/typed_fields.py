"""Body fields that a router acts on, converted to the values that vLLM reads.

vLLM reads `"2"` and `2.0` as the whole number 2, and `"no"` as false. The router must read the same
values. Otherwise its number of choices, for example, could differ from the replica's.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError

_WHOLE, _YES_OR_NO = TypeAdapter[int](int), TypeAdapter[bool](bool)
_TYPES: Mapping[str, TypeAdapter[Any]] = {
    **dict.fromkeys(("n", "priority", "prompt_logprobs", "top_logprobs"), _WHOLE),
    **dict.fromkeys(
        ("echo", "store", "background", "return_prompt_text", "enable_response_messages"),
        _YES_OR_NO,
    ),
}


def read_as_vllm_does(body: dict[str, Any]) -> None:
    """Replace the fields of a body that the router acts on by the values that vLLM reads.

    A value that vLLM rejects stays unchanged, and the replica answers with vLLM's error.
    """
    for name in _TYPES.keys() & body.keys():
        if body[name] is not None:
            with suppress(ValidationError):
                body[name] = _TYPES[name].validate_python(body[name])
