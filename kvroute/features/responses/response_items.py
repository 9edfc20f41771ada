"""Reads and changes response objects of the Responses API, in bodies and in stream events.

Only changed members are encoded again. All other bytes stay as the replica wrote them.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvroute.router.api.json_members import Members, encode, members

PREVIOUS = "previous_response_id"
# The member PREVIOUS as every replica writes it, since replicas do not know earlier responses.
NO_PREVIOUS = b'"previous_response_id":null'
OBJECT = "response"  # member of an event that holds the response object
DATA = b"data: "  # start of the line with an event's JSON
# First lines of the events that end a stream. JSON cannot contain such a line, because line ends in
# strings are escaped.
LAST_EVENTS = (b"event: response.completed\n", b"event: response.incomplete\n")


def events_with(more: Members, data: bytes) -> bytes:
    """Return complete events of a stream, with these members in each response object."""
    if NO_PREVIOUS not in data:
        return data
    return b"\n\n".join(_event_with(more, event) for event in data.split(b"\n\n"))


def last_response(data: bytes) -> Members | None:
    """Return the response object of a stream's final event, or None if there is no such event.

    Raises:
        DECODE_ERRORS: the event cannot be read.
    """
    if not any(line in data for line in LAST_EVENTS):
        return None
    for event in data.split(b"\n\n"):
        if event.startswith(LAST_EVENTS):
            return members(members(event.partition(DATA)[2])[OBJECT])
    return None


def as_input(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the output items of a response as input items of the next response.

    What vLLM cannot read is left out: log-probabilities, empty messages, and the encrypted copy of
    reasoning.
    """
    return [_input_item(item) for item in output if not _is_empty_message(item)]


def _event_with(more: Members, event: bytes) -> bytes:
    head, mark, body = event.partition(DATA)
    if NO_PREVIOUS not in body or not head.startswith(b"event: "):
        return event
    event_members = members(body)
    if OBJECT not in event_members:
        return event
    response = members(event_members[OBJECT]) | more
    return head + mark + encode({**event_members, OBJECT: msgspec.Raw(encode(response))})


def _is_empty_message(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "message" and not item.get("content")


def _input_item(item: Mapping[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    if item.get("type") == "reasoning":
        return {name: value for name, value in item.items() if name != "encrypted_content"}
    if item.get("type") != "message" or not isinstance(content, list):
        return dict(item)
    return {**item, "content": [_without_logprobs(part) for part in content]}


def _without_logprobs(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return {name: value for name, value in part.items() if name != "logprobs"}


def listed(items: list[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """Return input items in the form in which the API lists them.

    Each item has an id, a type, and its content as a list of parts.
    """
    return [
        with_parts({"id": listed_id(response_id, number), "type": "message", **item})
        for number, item in enumerate(items)
    ]


def listed_id(response_id: str, number: int) -> str:
    """Return the id that clients see for an item of a response's input that has none.

    Args:
        number: the item's index in the conversation.
    """
    return f"msg_{response_id}_{number}"


def with_parts(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item with its content as a list of parts, if it is a text."""
    if not isinstance(item.get("content"), str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    part = {"type": kind, "text": item["content"]}
    return {**item, "content": [part | ({"annotations": []} if kind == "output_text" else {})]}
