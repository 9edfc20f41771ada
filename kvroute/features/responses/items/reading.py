"""Turns items that clients send into items that every replica can read.

References become the items that they name. Reasoning that this cluster has encrypted is decrypted.
Foreign reasoning is replaced by its summary.
"""

from collections.abc import Sequence
from typing import Any

from kvroute.features.gate import Caller
from kvroute.features.responses.items.ciphers import Cipher
from kvroute.features.responses.items.compaction import TRIGGER, is_compaction
from kvroute.features.responses.items.input_items import InputItem, new_item
from kvroute.features.responses.items.references import References, too_long, unknown
from kvroute.features.responses.stores.leased_values import owner
from kvroute.router.api.call_limits import MAX_ITEMS, MAX_NAME, MAX_VALUES, values_in
from kvroute.router.api.calls import Call
from kvroute.router.api.errors import invalid, shown
from kvroute.router.history.openai_items import HOSTED_ITEM

REFERENCE = "item_reference"
WITHOUT_STORE = "this server stores no items; start it with --response-store-mb"
# Type of an item that replicas can read -> its fields that must be strings.
READABLE = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id",),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id",),
    "reasoning": (),
}
OUTPUTS = ("function_call_output", "custom_tool_call_output")
ROLES = ("user", "assistant", "system", "developer")
# Types of a message's parts -> the fields of which one must be a string.
PARTS = {
    "input_text": ("text",),
    "output_text": ("text",),
    "refusal": ("refusal",),
    "input_image": ("image_url", "file_id"),
    "input_file": ("file_data", "file_url", "file_id"),
}


class ItemReader:
    """Reads the items of one request.

    Args:
        caller: the sender of the request.
        cache_salt: its `cache_salt`.
        shared: see Cipher.
        references: the stored items; None: this server stores none.
    """

    def __init__(
        self, caller: Caller, cache_salt: str | None, shared: str, references: References | None
    ) -> None:
        self.left_out: dict[str, None] = {}  # types of the items that nobody can read here
        self.salt = owner(caller, cache_salt)
        self.cipher = Cipher(caller, cache_salt, shared)
        self._references = references

    def must_read(self, call: Call) -> bool:
        """Return whether the input of a call has items that replicas cannot read."""
        given = call.body.get("input")
        return isinstance(given, list) and any(map(_is_special, given))

    async def read(self, items: Sequence[InputItem]) -> list[InputItem]:
        """Return items that replicas can read.

        Items with a summary of earlier ones stay, since what they replace must be known. Invalid
        items stay, too: replicas refuse them.

        Raises:
            ApiError: an item that another one refers to is not stored.
        """
        changed = list(map(self._with_reasoning, await self._resolved(items)))
        if None in changed:
            self.left_out["reasoning"] = None
        return [item for item in changed if item is not None]

    async def storable(self, values: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the items that a conversation gets if a client adds these.

        Raises:
            ApiError: no response could have one of them in its input.
        """
        for number, value in enumerate(values):
            if problem := self._problem(value):
                raise invalid("items", f"items[{number}] {problem}")
        return [item.value for item in await self.read([new_item(value) for value in values])]

    async def _resolved(self, items: Sequence[InputItem]) -> Sequence[InputItem]:
        ids = list(dict.fromkeys(_referred(n, item.value) for n, item in enumerate(items)))
        wanted = [id_ for id_ in ids if id_ is not None]
        if not wanted:
            return items
        if self._references is None:
            raise unknown(wanted[0], WITHOUT_STORE)
        found, result = await self._references.find(wanted, self.salt), list[InputItem]()
        for number, item in enumerate(items):
            if (id_ := _referred(number, item.value)) is None:
                result.append(item)
            elif stored := found.pop(id_, None):  # a second reference to it adds nothing
                result.append(new_item(stored))
        values = values_in(item.value for item in result)
        if len(result) > MAX_ITEMS["input"] or values > MAX_VALUES:
            raise too_long()
        return result

    def _with_reasoning(self, item: InputItem) -> InputItem | None:
        """Return an item with reasoning in plain text; None if it is foreign, without a summary."""
        if not _has_hidden_reasoning(item.value):
            return item
        value: dict[str, Any] = {k: v for k, v in item.value.items() if k != "encrypted_content"}
        encrypted = item.value.get("encrypted_content")
        own = self.cipher.decrypt("reasoning", encrypted) if isinstance(encrypted, str) else None
        content = own or value.get("content") or _as_content(value.get("summary"))
        if not content:
            return None
        return new_item({**value, "summary": value.get("summary") or [], "content": content})

    def _problem(self, value: dict[str, Any]) -> str:
        """Return why no response can have an item in its input; empty: one can."""
        kind: str = value.get("type") or "message"
        if is_reference(value):
            return ""
        if is_compaction(value):
            encrypted = value.get("encrypted_content")
            if isinstance(encrypted, str) and self.cipher.decrypt("summary", encrypted) is not None:
                return ""
            return f"is a {kind} that this server has not made for you; leave it out"
        if kind == "message":
            return _problem_of_message(value)
        if HOSTED_ITEM.fullmatch(kind):  # left out of the prompt; its text stays
            return ""
        if kind not in READABLE:
            return (
                f"has the type {shown(kind)}, which models cannot read; expected message, "
                f"{', '.join(READABLE)} or {REFERENCE}"
            )
        for name in READABLE[kind]:
            if not isinstance(value.get(name), str):
                return f"is a {kind} whose {name} is {shown(value.get(name))}; expected a string"
        if kind in OUTPUTS and not isinstance(value.get("output"), str | list):
            return f"is a {kind} whose output is {shown(value.get('output'))}; expected a string"
        if kind == "reasoning" and self._with_reasoning(new_item(value)) is None:
            return (
                "is reasoning that another server, or this one for another tenant, has encrypted, "
                "without a summary; leave it out"
            )
        return ""


def is_reference(value: dict[str, Any]) -> bool:
    """Return whether an item is a reference to a stored one, whose type clients may leave out."""
    kind = value.get("type")
    return kind == REFERENCE or (kind is None and "id" in value and "role" not in value)


def _referred(number: int, value: Any) -> str | None:
    """Return the id of the item that an item refers to; None: it is no reference.

    Args:
        number: the item's index.

    Raises:
        ApiError: the id is not valid.
    """
    if not (isinstance(value, dict) and is_reference(value)):
        return None
    id_ = value.get("id")
    if not (isinstance(id_, str) and 0 < len(id_) <= 2 * MAX_NAME):
        raise invalid(
            "input",
            f"input[{number}] is an {REFERENCE} whose id is {shown(id_)}; expected the id of a "
            "stored item",
        )
    return id_


def _is_special(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    is_trigger = value.get("type") == TRIGGER
    return is_trigger or is_reference(value) or _has_hidden_reasoning(value)


def _has_hidden_reasoning(value: Any) -> bool:
    """Return whether replicas cannot read an item with reasoning, or not all of it."""
    if not (isinstance(value, dict) and value.get("type") == "reasoning"):
        return False
    is_encrypted = value.get("encrypted_content") is not None
    return is_encrypted or not (value.get("content") and isinstance(value.get("summary"), list))


def _as_content(summary: Any) -> list[dict[str, str]]:
    """Return the summary of reasoning as its content."""
    parts = summary if isinstance(summary, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    text = "\n\n".join(text for text in texts if isinstance(text, str) and text)
    return [{"type": "reasoning_text", "text": text}] if text else []


def _problem_of_message(value: dict[str, Any]) -> str:
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        return f"is a message whose role is {shown(role)}; expected one of {', '.join(ROLES)}"
    if isinstance(content, list):
        for number, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            names = PARTS.get(kind, ()) if isinstance(kind, str) else ()
            if not any(isinstance(part[name], str) for name in names if name in part):
                return (
                    f"is a message whose part content[{number}] is {shown(part)}; expected a part "
                    f"of one of the types {', '.join(PARTS)}, with its value"
                )
    elif not isinstance(content, str):
        return f"is a message whose content is {shown(content)}; expected a text or a list of parts"
    if role == "assistant" and not _has_text(content):
        return "is an assistant message without text; leave it out"
    return ""


def _has_text(content: str | list[dict[str, Any]]) -> bool:
    if isinstance(content, str):
        return bool(content)
    return any(part.get("text") or part.get("refusal") for part in content)
