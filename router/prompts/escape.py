"""The messages of a call have no special token that its client has written.

The body is changed once, before anything renders it: routers and replicas then render the same.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace
from pydantic_core import from_json

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.router.api.calls import CHATS, COMPLETIONS, MESSAGES, RESPONSES, Call
from kvroute.router.api.errors import invalid, shown
from kvroute.router.api.response_object import members
from kvroute.router.prompts.escaped_values import Values
from kvroute.router.prompts.special_tokens import SpecialTokens

CHAT = ("messages", "system", "tools", "documents", "chat_template_kwargs", "reasoning_effort")
FIELDS = {  # of bodies, which come into prompts
    CHATS: CHAT,
    MESSAGES: CHAT,
    f"{MESSAGES}/count_tokens": CHAT,
    "/tokenize": CHAT,
    RESPONSES: (*CHAT, "input", "instructions", "previous_input_messages"),
    COMPLETIONS: (),
}
OTHER_FIELDS = ("messages",)  # of other routes
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


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
        if not names or not self._tokens.may_be_in(call.raw):
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
        """Those that have any, without."""
        values = Values(self._tokens)
        try:
            after = {name: values.field(name, value) for name, value in fields.items()}
        except RecursionError:
            raise invalid(None, "the body has too many values in values; send fewer") from None
        return {name: value for name, value in after.items() if value != fields[name]}

    def _check_roles(self, messages: Any) -> None:
        """Some templates write <|role|>."""
        for message in messages if isinstance(messages, list) else ():
            role = message.get("role") if isinstance(message, dict) else None
            if isinstance(role, str) and role not in KNOWN_ROLES:
                self._check_role(role)

    def _check_role(self, role: str) -> None:
        if self._tokens.may_complete(role):
            raise invalid(
                "messages", f"role is {shown(role)}; expected one of {', '.join(KNOWN_ROLES)}"
            )


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
