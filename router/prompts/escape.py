"""The messages of a call have no special token that its client has written.

The body is changed once, before anything renders it: routers and replicas then render the same.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace
from pydantic_core import from_json

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.router.api.call_limits import MAX_VALUES
from kvroute.router.api.calls import CHATS, COMPLETIONS, MESSAGES, RESPONSES, Call
from kvroute.router.api.errors import invalid, shown
from kvroute.router.api.response_object import members
from kvroute.router.prompts.special_tokens import SpecialTokens

CHAT = ("messages", "system", "tools", "documents", "chat_template_kwargs", "reasoning_effort")
FIELDS = {  # fields of bodies whose texts come into prompts
    CHATS: CHAT,
    MESSAGES: CHAT,
    f"{MESSAGES}/count_tokens": CHAT,
    "/tokenize": CHAT,
    RESPONSES: (*CHAT, "input", "instructions", "previous_input_messages"),
    COMPLETIONS: (),
}
OTHER_FIELDS = ("messages",)  # such fields of other routes
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MARKS = ",[{"  # before each JSON value, but for those of one-member objects
FEW = 1000  # matches in a text from which each value is checked without a closer look
STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
EXACT = ("enum", "const", "default")  # members of a tool's schema that the model repeats


class Escape:
    """tokens: of the model's tokenizer and template."""

    def __init__(self, tokens: SpecialTokens) -> None:
        self._tokens = tokens

    def call(self, call: Call) -> Call:
        """Return the call without special tokens.

        Raises:
            ApiError: 400, a role would become part of one, or values are nested without end, or the
                body cannot be read here although it could be read before.
        """
        names = FIELDS.get(call.path, OTHER_FIELDS)
        for name in names:
            self._check_roles(call.body.get(name))
        if not names:
            return call
        try:
            fields = members(call.raw)
            given = {name: from_json(bytes(fields[name])) for name in names if name in fields}
        except (ValueError, *DECODE_ERRORS):  # a conversation's other writer wrote no JSON
            raise invalid(None, "the body cannot be read to escape special tokens") from None
        if not (changed := self._changed(given)):
            return call
        written = {name: msgspec.Raw(_json(value)) for name, value in changed.items()}
        raw = msgspec.json.encode({**fields, **written})
        return replace(call, raw=raw, body={**call.body, **changed})

    def _changed(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields with special tokens, without these."""
        values = _Values(self._tokens)
        try:
            after = {name: values.field(name, value) for name, value in fields.items()}
        except RecursionError:
            raise invalid(None, "the body has too many values in values; send fewer") from None
        return {name: value for name, value in after.items() if value != fields[name]}

    def _check_roles(self, messages: Any) -> None:
        """Refuse roles with special tokens, since some templates write <|role|>."""
        for message in messages if isinstance(messages, list) else ():
            role = message.get("role") if isinstance(message, dict) else None
            if isinstance(role, str) and role not in KNOWN_ROLES:
                self._check_role(role)

    def _check_role(self, role: str) -> None:
        if self._tokens.may_complete(role):
            raise invalid(
                "messages", f"role is {shown(role)}; expected one of {', '.join(KNOWN_ROLES)}"
            )


class _Values:
    """The values of one call, without special tokens: their place decides how each is broken."""

    def __init__(self, tokens: SpecialTokens) -> None:
        self._tokens = tokens
        self._in_arguments = 0  # JSON values in the strings of all tool calls, about

    def field(self, name: str, value: Any) -> Any:
        """Return the value of a body's field without special tokens.

        Raises:
            ApiError: arguments have too many values.
        """
        if name == "tools":
            return self._value(value, is_schema=True)
        if not isinstance(value, list) or not value or not _is_answer(value[-1]):
            return self._value(value)
        *before, last = value
        return [*self._value(before), self._begun(last)]

    def _begun(self, answer: Mapping[str, Any]) -> Any:
        """Return an answer that the model may continue; no text of the client follows it."""
        content = answer["content"]
        rest = self._value({k: v for k, v in answer.items() if k != "content"})
        if isinstance(content, str):
            ended: Any = self._tokens.text(content, may_go_on=False)
        else:
            *parts, last = content
            text = {"text": self._tokens.text(last["text"], may_go_on=False)}
            ended = [*self._value(parts), self._value({**last, "text": ""}) | text]
        return {**rest, "content": ended}

    def _value(self, value: Any, *, is_schema: bool = False) -> Any:
        if isinstance(value, str):
            return self._tokens.text(value)
        if isinstance(value, list):
            return [self._value(each, is_schema=is_schema) for each in value]
        if isinstance(value, dict):
            return {
                self._tokens.name(name): self._member(name, each, is_schema=is_schema)
                for name, each in value.items()
            }
        return value

    def _member(self, name: str, value: Any, *, is_schema: bool) -> Any:
        if name == "arguments" and isinstance(value, str):
            return self._arguments(value)
        if name == "name" and isinstance(value, str):
            return self._tokens.name(value)
        if is_schema and name in EXACT:
            return self._exact(value)
        return self._value(value, is_schema=is_schema)

    def _exact(self, value: Any) -> Any:
        """Return the value without special tokens; strings keep their ends.

        An object may be the schema of a property with the name of a field.
        """
        if isinstance(value, str):
            return self._tokens.text(value, may_go_on=False)
        if isinstance(value, list):
            return [self._exact(each) for each in value]
        return self._value(value, is_schema=True)

    def _arguments(self, text: str) -> str:
        """Return a tool call's arguments, which are JSON in a string, without special tokens.

        Templates get what the JSON means, or the text.
        """
        self._count(text)
        try:
            before = json.loads(text)  # parsed as vLLM parses it
        except ValueError:
            before = None
        if not isinstance(before, dict | list):
            return self._tokens.text(text)
        after = self._value(before)
        # The text may have more than what it means: of equal names, the last one counts.
        is_free = after == before and self._tokens.text(text, may_go_on=False) == text
        return text if is_free else json.dumps(after)

    def _count(self, text: str) -> None:
        if sum(map(text.count, MARKS)) > FEW:
            text = STRING.sub("", text)
        self._in_arguments += sum(map(text.count, MARKS))
        if self._in_arguments > MAX_VALUES:
            raise invalid(
                None,
                f"the arguments of tool calls have more than {MAX_VALUES} values together; send "
                "fewer calls, or shorter ones",
            )


def _is_answer(message: Any) -> bool:
    """Return whether it is an assistant's message that ends with text."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return False
    if message.get("tool_calls") or message.get("name"):  # templates write them behind the text
        return False
    content = message.get("content")
    last = content[-1] if isinstance(content, list) and content else None
    is_text = isinstance(last, dict) and isinstance(last.get("text"), str)
    return isinstance(content, str) or is_text


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
