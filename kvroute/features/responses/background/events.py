"""The events of a background response, from several runs, with numbers that only rise."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.responses.response_items import DATA, OBJECT
from kvroute.features.responses.stores.background_store import Status
from kvroute.router.api.json_members import Members, encode, members

NUMBER = "sequence_number"  # the member of an event that counts the events of a response
END = b"\n\n"  # the end of an event
FINAL = ("response.completed", "response.incomplete", "response.failed")  # types of last events

_statuses = msgspec.json.Decoder(Status)


@dataclass
class Events:
    """The events of one run of a response, in the order in which they come."""

    first: int  # the number of the run's first event
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
        self._taken += (self._numbered(event) + END for event in whole if DATA in event)

    def taken(self) -> bytes:
        """Return the events that were added since the last call."""
        data, self._taken = b"".join(self._taken), []
        return data

    def _numbered(self, event: bytes) -> bytes:
        """Note what an event says, and return it with its number among all events."""
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
            return event
        self.response = response or self.response
        self.status = status or self.status
        if kind == "error":
            self.error = told
        number, self.next = self.next, self.next + 1
        return head + mark + encode({**told, NUMBER: number})


def after(data: bytes, number: int) -> Iterator[bytes]:
    """Yield the events in some data that have a higher number."""
    for event in data.split(END):
        try:
            found = msgspec.json.decode(members(event.partition(DATA)[2])[NUMBER], type=int)
        except (*DECODE_ERRORS, LookupError):
            continue
        if found > number:
            yield event + END
