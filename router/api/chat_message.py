"""A chat message that consists of text."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from kvroute.router.api.errors import shown

MAX_MESSAGES = 8192  # largest number of messages in a chat
MAX_PARTS = 1024  # largest number of parts in a message's content


def _problem(message: str) -> PydanticCustomError:
    """Return an error for a validator to raise. Braces in the message are not interpreted."""
    return PydanticCustomError("kvroute", "{message}", {"message": message})


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
