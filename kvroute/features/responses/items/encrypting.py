"""Adds `encrypted_content` to the reasoning in a response, for clients that keep the history.

Clients such as Codex send the encrypted reasoning in the next turn, and no other one. The prompt
then begins as that of the turn before, so its prefix is cached.
"""

from typing import Any

import msgspec

from kvroute.features.responses.items.ciphers import Cipher
from kvroute.features.responses.response_items import DATA, LAST_EVENTS, OBJECT
from kvroute.features.responses.storing import ResponseEdit
from kvroute.router.api.calls import Call
from kvroute.router.api.json_members import Members, encode, members

INCLUDED = "reasoning.encrypted_content"  # the value of the field `include` that asks for it
REASONING = b'"reasoning"'  # the type of items with reasoning, in JSON
ITEM_DONE = b"event: response.output_item.done\n"  # first line of an event with a complete item


def wants_encrypted(call: Call) -> bool:
    """Return whether a call asks for encrypted reasoning."""
    include = call.body.get("include")
    return isinstance(include, list) and INCLUDED in include


class Encrypting(ResponseEdit):
    """Adds `encrypted_content` to complete items with reasoning."""

    def __init__(self, cipher: Cipher) -> None:
        self._cipher = cipher

    async def whole(self, response: Members) -> Members:
        output = response["output"]
        if REASONING not in bytes(output):
            return response
        items = msgspec.json.decode(output, type=list[msgspec.Raw])
        return {**response, "output": msgspec.Raw(encode(list(map(self._item, items))))}

    async def events(self, data: bytes) -> bytes:
        if REASONING not in data:
            return data
        return b"\n\n".join([await self._event(event) for event in data.split(b"\n\n")])

    async def _event(self, event: bytes) -> bytes:
        if REASONING not in event or not event.startswith((ITEM_DONE, *LAST_EVENTS)):
            return event
        head, mark, body = event.partition(DATA)
        told = members(body)
        if OBJECT in told:
            response = await self.whole(members(told[OBJECT]))
            return head + mark + encode({**told, OBJECT: msgspec.Raw(encode(response))})
        return head + mark + encode({**told, "item": self._item(told["item"])})

    def _item(self, raw: msgspec.Raw) -> msgspec.Raw:
        item: dict[str, Any] = msgspec.json.decode(raw)
        if item.get("type") != "reasoning" or not item.get("content"):
            return raw
        encrypted = self._cipher.encrypt("reasoning", item["content"])
        return msgspec.Raw(encode({**item, "encrypted_content": encrypted}))
