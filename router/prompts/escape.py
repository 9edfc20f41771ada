"""Changes a call's body so that the client's text cannot contain special tokens.

This happens once, before the body is rendered, so that routers and replicas render the same body.
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
from kvroute.router.api.calls import CHAT_COMPLETIONS, COMPLETIONS, MESSAGES, RESPONSES, Call
from kvroute.router.api.errors import invalid, shown
from kvroute.router.api.json_members import members
from kvroute.router.prompts.special_tokens import SpecialTokens

# Fields of a chat's body whose text can be in the prompt.
CHAT = ("messages", "system", "tools", "documents", "chat_template_kwargs", "reasoning_effort")
# Fields of a Responses body whose text can be in the prompt.
RESPONSE = (*CHAT, "input", "instructions", "previous_input_messages")
# Route -> fields of its bodies whose text can be in the prompt.
FIELDS = {
    CHAT_COMPLETIONS: CHAT,
    MESSAGES: CHAT,
    f"{MESSAGES}/count_tokens": CHAT,
    "/tokenize": CHAT,
    RESPONSES: RESPONSE,
    f"{RESPONSES}/input_tokens": RESPONSE,
    COMPLETIONS: (),
}
OTHER_FIELDS = ("messages",)  # fields that are searched on all other routes
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Characters that are counted to estimate the number of values in a JSON text.
VALUE_MARKS = ",[{"
# If a text has more than this many VALUE_MARKS, those inside JSON strings are removed before
# counting. Below, they are counted too, which saves time.
CHEAP_MARKS = 1000
STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)  # a string in JSON
# Members of a tool's schema whose text the model has to repeat exactly.
EXACT = ("enum", "const", "default")


class Escape:
    """Breaks the special tokens in a call's text, so that they become ordinary text.

    How they are broken is explained in special_tokens.py.

    Args:
        tokens: the special tokens of the model's tokenizer and chat template.
    """

    def __init__(self, tokens: SpecialTokens) -> None:
        self._tokens = tokens

    def call(self, call: Call) -> Call:
        """Return the call without special tokens.

        Raises:
            ApiError: 400: a role could become part of a special token, values are nested too deep,
                the arguments of tool calls have too many values, or the body is not valid JSON for
                the parser that is used here.
        """
        names = FIELDS.get(call.path, OTHER_FIELDS)
        for name in names:
            self._check_roles(call.body.get(name))
        if not names:
            return call
        try:
            fields = members(call.raw)
            given = {name: from_json(bytes(fields[name])) for name in names if name in fields}
        except (ValueError, *DECODE_ERRORS):
            # Stored data that a feature has added to the body may be corrupt.
            raise invalid(
                None, "the body is not valid JSON, so special tokens cannot be escaped"
            ) from None
        if not (changed := self._changed(given)):
            return call
        written = {name: msgspec.Raw(_json(value)) for name, value in changed.items()}
        raw = msgspec.json.encode({**fields, **written})
        return replace(call, raw=raw, body={**call.body, **changed})

    def _changed(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return only the fields that had special tokens, with these tokens broken."""
        values = _Values(self._tokens)
        try:
            after = {name: values.field(name, value) for name, value in fields.items()}
        except RecursionError:
            raise invalid(None, "the body is nested too deep; send fewer nested values") from None
        return {name: value for name, value in after.items() if value != fields[name]}

    def _check_roles(self, messages: Any) -> None:
        """Refuse unknown roles that a template could turn into special tokens, such as <|role|>.

        Raises:
            ApiError: 400: a message has such a role.
        """
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
    """Breaks special tokens in the values of one call.

    How a value is changed depends on where it is in the body.
    """

    def __init__(self, tokens: SpecialTokens) -> None:
        self._tokens = tokens
        self._in_arguments = 0  # estimated number of JSON values in the arguments of tool calls

    def field(self, name: str, value: Any) -> Any:
        """Return the value of a body's field without special tokens.

        Raises:
            ApiError: the arguments of tool calls have too many values.
        """
        if name == "tools":
            return self._value(value, is_schema=True)
        if not isinstance(value, list) or not value or not _is_answer(value[-1]):
            return self._value(value)
        *before, last = value
        return [*self._value(before), self._unfinished(last)]

    def _unfinished(self, answer: Mapping[str, Any]) -> Any:
        """Break the special tokens in the assistant's message at the end of a chat.

        The model may continue this message. No text of the client follows it. So it may end with
        the first characters of a special token, such as "<".
        """
        content = answer["content"]
        rest = self._value({k: v for k, v in answer.items() if k != "content"})
        if isinstance(content, str):
            ended: Any = self._tokens.text(content, is_followed=False)
        else:
            *parts, last = content
            text = {"text": self._tokens.text(last["text"], is_followed=False)}
            ended = [*self._value(parts), self._value({**last, "text": ""}) | text]
        return {**rest, "content": ended}

    def _value(self, value: Any, *, is_schema: bool = False) -> Any:
        if isinstance(value, str):
            return self._tokens.text(value)
        if isinstance(value, list):
            return [self._value(item, is_schema=is_schema) for item in value]
        if isinstance(value, dict):
            return {
                self._tokens.name(name): self._member(name, member, is_schema=is_schema)
                for name, member in value.items()
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
        """Return a value that the model has to repeat, without special tokens.

        A string may end with the first characters of a special token. An object is handled as a
        schema: here `enum`, `const` or `default` is the name of a property.
        """
        if isinstance(value, str):
            return self._tokens.text(value, is_followed=False)
        if isinstance(value, list):
            return [self._exact(item) for item in value]
        return self._value(value, is_schema=True)

    def _arguments(self, text: str) -> str:
        """Return a tool call's arguments, which are JSON in a string, without special tokens.

        Templates write either the parsed JSON or the string. Both must have no special tokens.
        """
        self._count(text)
        try:
            before = json.loads(text)  # parsed as vLLM parses it
        except ValueError:
            before = None
        if not isinstance(before, dict | list):
            return self._tokens.text(text)
        after = self._value(before)
        # The text may contain more than the parsed JSON: if a name occurs twice in an object, the
        # parser keeps only the last value.
        is_free = after == before and self._tokens.text(text, is_followed=False) == text
        return text if is_free else json.dumps(after)

    def _count(self, text: str) -> None:
        """Count the JSON values in a tool call's arguments.

        Raises:
            ApiError: the arguments of all tool calls together have too many values.
        """
        if sum(map(text.count, VALUE_MARKS)) > CHEAP_MARKS:
            text = STRING.sub("", text)
        self._in_arguments += sum(map(text.count, VALUE_MARKS))
        if self._in_arguments > MAX_VALUES:
            raise invalid(
                None,
                f"the arguments of tool calls have more than {MAX_VALUES} values together; send "
                "fewer calls, or shorter ones",
            )


def _is_answer(message: Any) -> bool:
    """Return whether a message is of the assistant and ends with text."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return False
    if message.get("tool_calls") or message.get("name"):  # templates write these after the text
        return False
    content = message.get("content")
    last = content[-1] if isinstance(content, list) and content else None
    is_text = isinstance(last, dict) and isinstance(last.get("text"), str)
    return isinstance(content, str) or is_text


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
