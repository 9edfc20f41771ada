"""The events of a background response, from several runs, with numbers that only rise."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.responses.response_items import DATA, OBJECT
from kvroute.features.responses.stores.background_store import Status
from kvroute.router.api.json_members import Members, encode, members

NUMBER = "sequence_number"  # the member of an event that counts the events of a response
END = b"\n\n"  # the end of an event
FINAL = ("response.completed", "response.incomplete", "response.failed")  # types of last events

CREATED = "response.created"  # the type of a stream's first event
# Members of a response object that are equal to those of the request, or null.
AS_REQUESTED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "model", "prompt"),
    *("presence_penalty", "frequency_penalty", "previous_response_id", "reasoning", "temperature"),
    *("text", "top_logprobs", "top_p", "user", "safety_identifier", "prompt_cache_key"),
)
# Members that say what has not happened yet, and those of vLLM's own.
NOTHING_YET = (
    *("error", "incomplete_details", "usage", "kv_transfer_params", "ec_transfer_params"),
    *("input_messages", "output_messages", "completed_at"),
)

_statuses = msgspec.json.Decoder(Status)


@dataclass
class Events:
    """The events of one run of a response, in the order in which they come."""

    first: int  # the number of the run's first event
    # Whether clients have the event CREATED, so that this run's is left out.
    is_created: bool = False
    next: int = 0  # the number of the next event
    response: Members | None = None  # the latest response object
    status: Status | None = None  # the response's status in the last event; None: it has not ended
    error: Members | None = None  # the event `error`, if there was one
    _left: bytes = b""  # the beginning of an event
    _taken: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.next = self.first

    def add(self, data: bytes) -> None:
        """Add a part of the stream."""
        *whole, self._left = (self._left + data).split(END)
        self._taken += filter(None, (self._numbered(event) for event in whole if DATA in event))

    def taken(self) -> bytes:
        """Return the events that were added since the last call."""
        data, self._taken = b"".join(self._taken), []
        return data

    def _numbered(self, event: bytes) -> bytes:
        """Note what an event says, and return it with its number; nothing if it is left out."""
        head, mark, body = event.partition(DATA)
        try:
            told = members(body)
            kind = msgspec.json.decode(told["type"], type=str)
            response = members(told[OBJECT]) if OBJECT in told else None
            # vLLM ends an incomplete response with the event `response.completed`, too.
            status = _statuses.decode(response["status"]) if kind in FINAL and response else None
        except (
            *DECODE_ERRORS,
            LookupError,
        ):  # such as the end of the stream
            return event + END
        self.response = response or self.response
        self.status = status or self.status
        if kind == "error":
            self.error = told
        if kind == CREATED and self.is_created:
            return b""
        number, self.next = self.next, self.next + 1
        return head + mark + encode({**told, NUMBER: number}) + END


def event_of(kind: str, response: Mapping[str, Any], number: int) -> bytes:
    """Return an event with a response object."""
    told = {"type": kind, OBJECT: response, NUMBER: number}
    return f"event: {kind}\n".encode() + DATA + encode(told) + END


def queued(id_: str, created_at: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response object of a request that no replica has taken yet."""
    conversation = body.get("conversation")
    return {
        "id": id_,
        "object": OBJECT,
        "created_at": created_at,
        "status": "queued",
        "background": True,
        "output": [],
        "store": body.get("store") is not False,
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "conversation": {"id": conversation} if isinstance(conversation, str) else conversation,
        "service_tier": body.get("service_tier") or "auto",
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "truncation": body.get("truncation") or "disabled",
        **{name: body.get(name) for name in AS_REQUESTED},
        **dict.fromkeys(NOTHING_YET),
    }


def after(data: bytes, number: int) -> Iterator[bytes]:
    """Yield the events in some data that have a higher number."""
    for event in data.split(END):
        try:
            found = msgspec.json.decode(members(event.partition(DATA)[2])[NUMBER], type=int)
        except (*DECODE_ERRORS, LookupError):
            continue
        if found > number:
            yield event + END
