"""The check of a body's list ends at its first bad item.

vLLM would collect the errors of all items: 2,000 bad ones of /v1/responses, 70 KB, hold up every
stream of the replica for 5 s.
"""

import types
import typing
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, FailFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

FIELDS: tuple[tuple[type[BaseModel], str], ...] = (
    (ChatCompletionRequest, "messages"),
    (ResponsesRequest, "input"),
)


class _FailFast(FailFast):
    __hash__ = object.__hash__  # a member of a union needs one


def install() -> None:
    """Once for each process, before the application is built."""
    for model, name in FIELDS:
        field = model.model_fields[name]
        field.annotation = _fail_fast(field.annotation)
        if get_origin(field.annotation) is Annotated:
            field.metadata.append(_FailFast())
            field.annotation = get_args(field.annotation)[0]
        model.model_rebuild(force=True)


def _fail_fast(hint: Any) -> Any:
    if get_origin(hint) is list:
        return Annotated[hint, _FailFast()]
    if get_origin(hint) in (Union, types.UnionType):
        return typing.Union[tuple(map(_fail_fast, get_args(hint)))]  # noqa: UP007
    return hint
