"""Body fields that a router acts on, with the values that vLLM reads.

vLLM's models take `"2"` and `2.0` for the whole number 2, and `"no"` for false. A router that read
them in another way would count choices or store responses that the replica does not.
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
    """Replace these fields of a body by the values that vLLM reads.

    A value that vLLM refuses stays as it is: the replica answers with vLLM's error.
    """
    for name in _TYPES.keys() & body.keys():
        if body[name] is not None:
            with suppress(ValidationError):
                body[name] = _TYPES[name].validate_python(body[name])
