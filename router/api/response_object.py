"""A response object of the Responses API, in a body or in the events of a stream.

Only what has to change is written anew; all else stays byte for byte as the replica wrote it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

PREVIOUS = "previous_response_id"
NO_PREVIOUS = b'"previous_response_id":null'  # as a replica writes it
OBJECT = "response"  # the member of an event that holds the response object
DATA = b"data: "
# A line that begins so is in no JSON, which has no line ends within strings.
LAST_EVENTS = (b"event: response.completed\n", b"event: response.incomplete\n")

Members = dict[str, msgspec.Raw]

encode = msgspec.json.encode
_members = msgspec.json.Decoder(Members)


def members(raw: bytes | msgspec.Raw) -> Members:
    """A JSON object's members as they are written. Raises one of DECODE_ERRORS."""
    return _members.decode(raw)


def with_previous(response: Members, previous_id: str) -> Members:
    """The response object, which names the response before it."""
    return {**response, PREVIOUS: msgspec.Raw(encode(previous_id))}


def events_with_previous(data: bytes, previous_id: str) -> bytes:
    """Whole events of a stream, of which each response object names the response before it."""
    if NO_PREVIOUS not in data:
        return data
    return b"\n\n".join(_event_with_previous(each, previous_id) for each in data.split(b"\n\n"))


def last_response(data: bytes) -> Members | None:
    """The response object in the event that ends a stream, if that is among these events. Raises
    one of DECODE_ERRORS."""
    if not any(line in data for line in LAST_EVENTS):
        return None
    for event in data.split(b"\n\n"):
        if event.startswith(LAST_EVENTS):
            return members(members(event.partition(DATA)[2])[OBJECT])
    return None


def as_input(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Output items as input of the next response: without empty messages, which vLLM cannot read,
    and without log-probabilities."""
    return [_input_item(item) for item in output if not _is_empty_message(item)]


def _event_with_previous(event: bytes, previous_id: str) -> bytes:
    head, mark, body = event.partition(DATA)
    if NO_PREVIOUS not in body or not head.startswith(b"event: "):
        return event
    event_members = members(body)
    if OBJECT not in event_members:
        return event
    response = with_previous(members(event_members[OBJECT]), previous_id)
    return head + mark + encode({**event_members, OBJECT: msgspec.Raw(encode(response))})


def _is_empty_message(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "message" and not item.get("content")


def _input_item(item: Mapping[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    if item.get("type") != "message" or not isinstance(content, list):
        return dict(item)
    return {**item, "content": [_without_logprobs(part) for part in content]}


def _without_logprobs(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return {name: value for name, value in part.items() if name != "logprobs"}


def listed(items: list[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """Input items as a list of them shows them: each has an id and a type, and content in parts."""
    return [_listed(item, f"msg_{response_id}_{number}") for number, item in enumerate(items)]


def _listed(item: dict[str, Any], id_: str) -> dict[str, Any]:
    shown = {"id": id_, "type": "message", **item}
    if isinstance(shown.get("content"), str):
        kind = "output_text" if shown.get("role") == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": shown["content"]}]
    return shown
