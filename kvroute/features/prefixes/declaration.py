"""The body of a request that declares a named prefix."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    StrictBool,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError, ValidationError

from kvroute.features.prefixes.prefix_id import PrefixId
from kvroute.router.api.chat_message import MAX_MESSAGES, ChatMessage
from kvroute.router.api.errors import invalid

MAX_TTL_S = 1_000_000_000  # 31 years, far below the latest time that prefix_store.py can read

Name = Annotated[str, Field(max_length=256)]
# Number of replicas that keep the prefix in their caches.
Replicas = Literal["all"] | Annotated[int, Field(strict=True, ge=1)]
# Whether engines may not evict the prefix. "host": it is kept in host memory, not in GPU memory.
Pinned = StrictBool | Literal["host"]


def _as_one(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Validate a union, with one error for the whole union instead of one per member."""
    try:
        return validate(value)
    except ValidationError:
        raise PydanticCustomError("union", "expected another type") from None


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
