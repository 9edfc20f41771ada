"""Bodies of requests that create or change a conversation."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from kvroute.router.api.call_limits import MAX_NAME, MAX_VALUES, values_in
from kvroute.router.api.errors import shown
from kvroute.router.api.parsing import Metadata

MAX_ADDED = 20  # the most items that one request adds, as in OpenAI's API


class ItemsBody(BaseModel):
    """Items to add to a conversation."""

    model_config = ConfigDict(extra="ignore")

    items: Annotated[list[dict[str, Any]], Field(max_length=MAX_ADDED)]

    @field_validator("items")
    @classmethod
    def _check(cls, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Raise an error if there are too many values, or if an id or a type is not a string."""
        if values_in(items) > MAX_VALUES:
            raise _problem(f"they have more than {MAX_VALUES} JSON values; send fewer items")
        for number, item in enumerate(items):
            _check_item(number, item)
        return items


class ConversationBody(ItemsBody):
    """A new conversation."""

    items: Annotated[list[dict[str, Any]], Field(max_length=MAX_ADDED)] = []
    metadata: Metadata = {}


class MetadataBody(BaseModel):
    """The metadata of a conversation, which replaces its earlier metadata."""

    model_config = ConfigDict(extra="ignore")

    metadata: Metadata


def _check_item(number: int, item: dict[str, Any]) -> None:
    kind, id_ = item.get("type", "message"), item.get("id")
    if not isinstance(kind, str):
        raise _problem(f"the type of item {number} is {shown(kind)}; expected a string")
    if id_ is not None and not (isinstance(id_, str) and 0 < len(id_) <= MAX_NAME):
        raise _problem(
            f"the id of item {number} is {shown(id_)}; expected a string of 1 to {MAX_NAME} "
            "characters, or none"
        )


def _problem(message: str) -> PydanticCustomError:
    return PydanticCustomError("kvroute", "{message}", {"message": message})
