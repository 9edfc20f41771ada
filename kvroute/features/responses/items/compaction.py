"""Compaction: a summary, which the model writes, replaces the beginning of a conversation.

A client asks for it with an item of the type `compaction_trigger` at the end of the input, or with
POST /v1/responses/compact. It gets an item of the type `compaction` with the encrypted summary, and
sends this item in later turns. The router then gives the model the summary as a message.
"""

import secrets
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvroute.features.responses.items.ciphers import Cipher
from kvroute.features.responses.items.input_items import InputItem, new_item, with_input
from kvroute.features.responses.response_items import DATA, OBJECT, with_parts
from kvroute.features.responses.storing import ResponseEdit
from kvroute.router.api.calls import RESPONSES, Call
from kvroute.router.api.errors import invalid
from kvroute.router.api.json_members import Members, encode, members

COMPACT = f"{RESPONSES}/compact"  # the route that only compacts
TRIGGER = "compaction_trigger"
COMPACTION = "compaction"
# The types of items with an encrypted summary. Versions of Codex have used all of them.
COMPACTIONS = (COMPACTION, "compaction_summary", "context_compaction")
KEPT_ROLES = ("user", "system", "developer")  # messages that stay beside a summary
PROMPT = (
    "Summarize this conversation. From now on, only your summary and the user's messages are kept, "
    "so write down all that is needed to go on: what the user wants, what was decided and why, "
    "what was done, with the names, numbers, results and errors that still matter, and what is to "
    "be done next. Write only the summary, and call no tools."
)
OPENING = "The conversation before this message was replaced by your summary of it:\n\n"
# Fields of a body that are not for the generation of a summary.
NOT_FOR_SUMMARIES = ("text", "structured_outputs", "include", "stop", "max_tool_calls")
# Fields of a body that are not for COMPACT.
NOT_FOR_COMPACT = ("stream", "stream_options", "background", "store", "context_management")
COPIED = ("id", "created_at", "usage")  # members of a response that one of COMPACT has, too
# First lines of events that a client gets before a summary, and of those after it.
BEFORE = (b"event: response.created\n", b"event: response.queued\n")
BEGINS = b"event: response.in_progress\n"
ENDS = (b"event: response.completed\n", b"event: response.incomplete\n")
FAILURES = (b"event: response.failed\n", b"event: error\n")
COMMENT = b": compacting"  # replaces the events of the summary; clients ignore it
NUMBER = "sequence_number"
END = b"\n\n"  # the end of an event


def without_trigger(items: Sequence[InputItem]) -> tuple[Sequence[InputItem], bool]:
    """Return the items without a trigger, and whether there is one.

    Raises:
        ApiError: an item follows a trigger.
    """
    for number, item in enumerate(items):
        if isinstance(item.value, dict) and item.value.get("type") == TRIGGER:
            if number < len(items) - 1:
                raise invalid(
                    "input",
                    f"input[{number}] is a {TRIGGER}, but {len(items) - 1 - number} items follow; "
                    "send it as the last item",
                )
            return items[:-1], True
    return items, False


def for_compact(call: Call, items: Sequence[InputItem]) -> Call:
    """Return the call of /v1/responses that answers a call of COMPACT."""
    changed = with_input(call, items, **dict.fromkeys(NOT_FOR_COMPACT) | {"store": False})
    return msgspec.structs.replace(changed, path=RESPONSES)


def summarizing(call: Call, items: Sequence[InputItem]) -> Call:
    """Return a call whose answer is the summary of these items.

    The prompt begins as that of the latest turn, so most of it is cached. So it has the tools, too.
    """
    fields: dict[str, Any] = dict.fromkeys(NOT_FOR_SUMMARIES)
    if call.body.get("tools"):
        fields["tool_choice"] = "none"
    return with_input(call, [*items, new_item({"role": "user", "content": PROMPT})], **fields)


def shortened(
    items: Sequence[InputItem], cipher: Cipher, left_out: dict[str, None]
) -> list[InputItem]:
    """Return the items with the latest summary in the place of what it replaces.

    Of the items before it, the messages of users, developers and the system stay. Foreign summaries
    are left out, and their types are added to `left_out`.
    """
    summaries = [_summary(item.value, cipher) for item in items]
    readable = [number for number, summary in enumerate(summaries) if summary is not None]
    last = readable[-1] if readable else -1
    result = list[InputItem]()
    for number, (item, summary) in enumerate(zip(items, summaries, strict=True)):
        if number == last:
            result.append(new_item({"role": "user", "content": f"{OPENING}{summary}"}))
        elif is_compaction(item.value):
            if summary is None:
                left_out[item.value["type"]] = None
        elif number > last or _is_kept(item.value):
            result.append(item)
    return result


def has_summary(call: Call) -> bool:
    """Return whether an item of a call's input may have an encrypted summary."""
    return any(f'"{kind}"'.encode() in call.raw for kind in COMPACTIONS)


def is_compaction(item: Any) -> bool:
    """Return whether an item of an input has an encrypted summary."""
    return isinstance(item, dict) and item.get("type") in COMPACTIONS


def _summary(item: Any, cipher: Cipher) -> str | None:
    """Return the summary of an item; None: it has none, or a foreign one."""
    encrypted = item.get("encrypted_content") if is_compaction(item) else None
    found = cipher.decrypt("summary", encrypted) if isinstance(encrypted, str) else None
    return found if isinstance(found, str) else None


def _is_kept(item: Any) -> bool:
    is_message = isinstance(item, dict) and item.get("type", "message") in ("message", None)
    return is_message and item.get("role") in KEPT_ROLES


class NumberedEvents(ResponseEdit):
    """An edit that adds events to a stream, and so numbers all of them again."""

    def __init__(self) -> None:
        self._number = 0  # the sequence number of the next event
        self._has_begun = False  # whether the client has the events of `begin`

    @abstractmethod
    async def instead(self, event: bytes) -> list[bytes]:
        """Return the events that the client gets instead of one event of a replica."""

    @abstractmethod
    def begin(self) -> Iterator[bytes]:
        """Yield the events that the client gets before those of the output."""

    async def events(self, data: bytes) -> bytes:
        *whole, rest = data.split(END)
        return (
            b"".join([event + END for each in whole for event in await self._made_of(each)]) + rest
        )

    async def _made_of(self, event: bytes) -> list[bytes]:
        if event.startswith((*BEFORE, *FAILURES)):
            return [self.numbered(event)]
        if event.startswith(BEGINS):
            return [self.numbered(event), *self._beginning()]
        return [*self._beginning(), *await self.instead(event)]

    def _beginning(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield from self.begin()

    def made(self, kind: str, **more: Any) -> bytes:
        """Return a new event, with the next number."""
        head = f"event: {kind}\n".encode()
        return self.numbered(head + DATA + encode({"type": kind, **more}))

    def numbered(self, event: bytes) -> bytes:
        """Return an event with the next number."""
        head, mark, body = event.partition(DATA)
        number, self._number = self._number, self._number + 1
        return head + mark + encode({**members(body), NUMBER: number})


class Compacting(NumberedEvents):
    """Makes the item with the summary from the answer to a call of `summarizing`.

    Args:
        cipher: encrypts for the sender of the call.
        window: all items before the summary, for a response of COMPACT: that has the items that are
            the next input. None: it is another response, which has only the new item.
    """

    def __init__(self, cipher: Cipher, window: Sequence[InputItem] | None = None) -> None:
        super().__init__()
        self._cipher = cipher
        self._window = window
        self._id = f"cmp_{secrets.token_hex(24)}"

    async def whole(self, response: Members) -> Members:
        summary = _text(msgspec.json.decode(response["output"], type=list[dict[str, Any]]))
        item = self._item(self._cipher.encrypt("summary", summary))
        if self._window is None:
            return {**response, "output": msgspec.Raw(encode([item]))}
        output = [*_kept(self._window), item]
        changed = {"object": "response.compaction", "output": output}
        kept = Members((name, response[name]) for name in COPIED if name in response)
        return kept | {name: msgspec.Raw(encode(value)) for name, value in changed.items()}

    async def instead(self, event: bytes) -> list[bytes]:
        if not event.startswith(ENDS):
            return [COMMENT if event.startswith(b"event: ") else event]
        head, mark, body = event.partition(DATA)
        told = members(body)
        response = await self.whole(members(told[OBJECT]))
        item = msgspec.json.decode(response["output"], type=list[msgspec.Raw])[0]
        done = self.made("response.output_item.done", output_index=0, item=item)
        return [done, self.numbered(head + mark + encode({**told, OBJECT: response}))]

    def begin(self) -> Iterator[bytes]:
        yield self.made("response.output_item.added", output_index=0, item=self._item(""))
        yield self.made("response.compaction.compacting", output_index=0, item_id=self._id)

    def _item(self, encrypted: str) -> dict[str, str]:
        return {"id": self._id, "type": COMPACTION, "encrypted_content": encrypted}


def _text(output: Sequence[dict[str, Any]]) -> str:
    """Return the text of an answer; that of its reasoning if it has no other one."""
    for kind in ("message", "reasoning"):
        parts = [
            part["text"]
            for item in output
            if item.get("type") == kind
            for part in item.get("content") or ()
            if isinstance(part.get("text"), str)
        ]
        if text := "".join(parts).strip():
            return text
    return ""


def _kept(window: Sequence[InputItem]) -> Iterator[dict[str, Any]]:
    for item in window:
        if _is_kept(item.value):
            id_ = f"msg_{secrets.token_hex(24)}"
            yield with_parts({"id": id_, "type": "message", "status": "completed", **item.value})
