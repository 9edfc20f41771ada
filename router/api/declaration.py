"""The body of a request that declares a named prefix."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    StrictBool,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, ValidationError

from kvroute.contract.prefix_id import PrefixId
from kvroute.router.api.errors import invalid, shown

MAX_MESSAGES = 8192  # largest number of messages in a chat
MAX_TTL_S = 1_000_000_000  # 31 years, far below the latest time that store/ can read
MAX_PARTS = 1024  # largest number of parts in a message's content

Name = Annotated[str, Field(max_length=256)]
# Number of replicas that keep the prefix in their caches.
Replicas = Literal["all"] | Annotated[int, Field(strict=True, ge=1)]
# Whether engines may not evict the prefix. "host": it is kept in host memory, not in GPU memory.
Pinned = StrictBool | Literal["host"]


def _problem(message: str) -> PydanticCustomError:
    """Return an error for a validator to raise. Braces in the message are not interpreted."""
    return PydanticCustomError("kvroute", "{message}", {"message": message})


def _as_one(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Validate a union, with one error for the whole union instead of one per member."""
    try:
        return validate(value)
    except ValidationError:
        raise PydanticCustomError("union", "expected another type") from None


def _part_text(index: int, part: object) -> str:
    """Return the text of one part of a message."""
    if not isinstance(part, dict):
        raise _problem(f'part {index} is not an object such as {{"type": "text", "text": "hi"}}')
    if part.get("type") != "text":
        raise _problem(
            f"part {index} has type {shown(part.get('type'))}; a prefix can have text parts only"
        )
    if not isinstance(part.get("text"), str):
        raise _problem(f"the text of part {index} is not a string")
    return str(part["text"])


def _plain_text(content: object, info: ValidationInfo) -> str:
    """Return the text of a message. As in vLLM, text parts are joined by newlines."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and 0 < len(content) <= MAX_PARTS:
        return "\n".join(_part_text(index, part) for index, part in enumerate(content))
    if content is None and info.data.get("role") == "assistant":
        return ""
    raise _problem(
        f"expected a string, or a list of up to {MAX_PARTS} parts such as "
        '{"type": "text", "text": "hi"}'
    )


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_plain_text)]
    tool_calls: object = None
    function_call: object = None

    @field_validator("tool_calls", "function_call")
    @classmethod
    def _no_tools(cls, value: object) -> object:
        if value:
            raise _problem("a prefix cannot contain tool calls; send only the text")
        return value


class PrefixDeclaration(BaseModel):
    """A named prefix that stays in replicas' caches.

    The descriptions of the fields end the error messages about invalid values (parsing.py).
    """

    model: Name | None = Field(None, description="the name of a served model")
    id: PrefixId = Field(description="a number, or up to 128 characters without ␟")
    prompt: str | None = Field(None, min_length=1, description="a string that is not empty")
    messages: list[ChatMessage] | None = Field(
        None,
        min_length=1,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        description=f"a list of 1 to {MAX_MESSAGES} messages such as "
        '{"role": "system", "content": "hi"}',
    )
    replicas: Annotated[Replicas, WrapValidator(_as_one)] = Field(
        "all", description='"all", or a whole number from 1'
    )
    # Seconds until the prefix is dropped; None: it is kept until a client drops it.
    ttl_s: float | None = Field(
        None,
        strict=True,
        gt=0,
        le=MAX_TTL_S,
        allow_inf_nan=False,
        description=f"seconds, more than 0 and up to {MAX_TTL_S:,}",
    )
    pinned: Annotated[Pinned, WrapValidator(_as_one)] = Field(
        True, description='true, false or "host"'
    )
    # Whether requests of other tenants, and those with a cache_salt, find the prefix cached too.
    shared: StrictBool = Field(False, description="true or false")

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "expected exactly one of prompt and messages")
        return self

    def source(self) -> dict[str, Any]:
        """Return the declared text in the form in which a prefix is stored."""
        if self.messages is None:
            return {"prompt": self.prompt}
        messages = [{"role": chat.role, "content": chat.content} for chat in self.messages]
        return {"messages": messages}
