"""The items of a call's input, each as a value and as the JSON that the client has sent."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvroute.features.responses.stores.response_store import joined
from kvroute.router.api.calls import Call
from kvroute.router.api.json_members import encode, members


class InputItem(NamedTuple):
    """One item. Its JSON is kept, so that replicas get numbers as the client has written them."""

    value: Any
    raw: bytes | msgspec.Raw


def new_item(value: Mapping[str, Any]) -> InputItem:
    """Return an item that the client has not sent in this form."""
    return InputItem(value, encode(value))


def input_items(call: Call) -> list[InputItem]:
    """Return the items of a call's input. A text is one message, and an invalid input no item."""
    given = call.body.get("input")
    if isinstance(given, str):
        return [new_item({"role": "user", "content": given})]
    if not isinstance(given, list):
        return []
    raws = msgspec.json.decode(members(call.raw)["input"], type=list[msgspec.Raw])
    return [InputItem(value, raw) for value, raw in zip(given, raws, strict=True)]


def with_input(call: Call, items: Sequence[InputItem], **more: Any) -> Call:
    """Return the call with these items as its input, and with other fields changed.

    Args:
        more: new values of other fields; None: the field is left out.
    """
    removed = [name for name, value in more.items() if value is None]
    changed = {name: value for name, value in more.items() if value is not None}
    given = {name: raw for name, raw in members(call.raw).items() if name not in removed}
    kept = {name: value for name, value in call.body.items() if name not in removed}
    raw = msgspec.Raw(joined([b"[%b]" % bytes(item.raw) for item in items]))
    return replace(
        call,
        raw=encode({**given, **changed, "input": raw}),
        body={**kept, **changed, "input": [item.value for item in items]},
    )
