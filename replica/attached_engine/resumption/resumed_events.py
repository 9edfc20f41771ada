"""Writes the events of the second server as the first one would have written them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from kvroute.replica.attached_engine.resumption.cut import Cut
from kvroute.replica.attached_engine.resumption.joined_text import JoinedText
from kvroute.replica.attached_engine.resumption.plain_stream import PlainStream
from kvroute.replica.attached_engine.resumption.token_events import (
    DONE,
    EVENT_BEGIN,
    ReadEvent,
    TokenEvents,
    answer_id,
)
from kvroute.replica.attached_engine.server_bodies import CHAT, COMPLETIONS

CHUNK = "chat.completion.chunk"  # the kind of a chat's events
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FirstPart:
    """The answer as far as the first server has sent it, and what its events have in common."""

    plain: PlainStream
    request_id: str
    created: int  # Unix time in the response
    prompt: Sequence[int]  # the token ids of the client's prompt
    answered: Sequence[int]  # the token ids of the answer so far
    cached_tokens: int  # tokens of the prompt that the first server had cached
    written_tokens: int  # tokens of the prompt that the first server wrote to its cache
    cut: Cut
    context: int  # the most tokens of a prompt and its answer


class _End(NamedTuple):
    """The end of an answer at a stop string that begins before the cut."""

    text: str
    token_ids: list[int]
    stop_string: str


class ResumedEvents:
    """The events of the second server, which gets the prompt and the answer as a completion.

    A stop string that begins before the cut is found here, and then the server's stream is cut.
    To close the answer, the server is asked for one more token, and the events of this second
    stream are written with the text and the tokens that the answer ends with.
    """

    def __init__(self, first_part: FirstPart) -> None:
        self.is_cut = True  # no stream is read yet
        self._generated: list[int] = []  # token ids from the second server
        self._first_part = first_part
        self._text = JoinedText(
            first_part.cut.before,
            first_part.plain.stops,
            includes_stop=first_part.plain.includes_stop,
        )
        self._is_repeated = True  # whether the tokens that it generates again are the same
        self._end: _End | None = None
        self._tokens = self._token_events()

    @property
    def can_continue(self) -> bool:
        return self._is_repeated and self._tokens.can_continue

    @property
    def has_failed(self) -> bool:
        return self._tokens.has_failed

    @property
    def created(self) -> int:
        return self._first_part.created

    @property
    def is_complete(self) -> bool:
        """Return whether the server need not be asked again."""
        return not self.is_cut

    def next_body(self) -> bytes:
        """Return the body of the next request to the second server, whose events are read next."""
        first_part, self.is_cut = self._first_part, False
        self._tokens = self._token_events()
        answered = first_part.cut.kept + len(self._generated)
        left = first_part.plain.tokens_left(answered, len(first_part.prompt), first_part.context)
        return msgspec.json.encode(
            first_part.plain.rest(answered)
            | {"prompt": self._prompt(), "max_tokens": left if self._end is None else 1}
        )

    def _prompt(self) -> list[int]:
        """Return the token ids that the server gets as a prompt."""
        first_part = self._first_part
        return [*first_part.prompt, *first_part.answered[: first_part.cut.kept], *self._generated]

    def _token_events(self) -> TokenEvents:
        return TokenEvents(COMPLETIONS, self._first_part.request_id, self._prompt(), shows_ids=True)

    def read(self, event: bytes) -> ReadEvent:
        """Return the event for the client.

        Raises:
            RuntimeError: The event has an unknown form, or contradicts what the client has.
        """
        read = self._tokens.read(event)
        if read.token_ids is None:
            raise RuntimeError("an event of an attached server that continues an answer is unknown")
        payload = event.removeprefix(EVENT_BEGIN).rstrip()
        fields = {} if payload == DONE else msgspec.json.decode(payload)
        if "choices" not in fields:  # the end of the stream, or an error
            return read
        if not fields["choices"]:
            self._sign(fields)
            return read._replace(data=_event(fields))
        return self._of_choice(fields, read)

    def _of_choice(self, fields: Json, read: ReadEvent) -> ReadEvent:
        choice = fields["choices"][0]
        if self._end is None:
            is_last = choice["finish_reason"] is not None
            text = self._text.add(
                choice["text"], is_last=is_last, stop_reason=choice.get("stop_reason")
            )
            ids = self._new(read.token_ids or ())
            if self._text.ended_by is not None:
                self._end, self.is_cut = _End(text, ids, self._text.ended_by), True
                return ReadEvent(b"")
        else:
            text, ids, stop = self._end
            choice |= {"finish_reason": "stop", "stop_reason": stop}
        if not text and not ids and not read.is_held:  # the client has the event already
            return ReadEvent(b"")
        choice["text"] = text
        choice["prompt_token_ids"] = None
        choice["token_ids"] = ids if self._first_part.plain.returns_ids else None
        if self._first_part.plain.path == CHAT:
            fields["choices"] = [_chat_choice(choice)]
        self._sign(fields)
        return ReadEvent(_event(fields), tuple(ids), len(text), read.is_held)

    def _new(self, token_ids: Sequence[int]) -> list[int]:
        """Add tokens, and return those that the client has not got."""
        again = self._first_part.answered[self._first_part.cut.kept :]
        self._generated += token_ids
        first = max(0, len(again) - len(self._generated) + len(token_ids))
        repeated = min(len(again), len(self._generated))
        self._is_repeated &= [*again[:repeated]] == self._generated[:repeated]
        if self._first_part.plain.returns_ids and not self._is_repeated:
            raise RuntimeError("an attached server that continues an answer has drawn other tokens")
        return [*token_ids[first:]]

    def _sign(self, fields: Json) -> None:
        """Set what all events of the answer have in common, and the usage."""
        first_part = self._first_part
        fields["id"] = answer_id(first_part.plain.path, first_part.request_id)
        fields["created"] = first_part.created
        if first_part.plain.path == CHAT:
            fields["object"] = CHUNK
        if usage := fields.get("usage"):
            answer = first_part.cut.kept + len(self._generated)
            usage["prompt_tokens"] = len(first_part.prompt)
            usage["completion_tokens"] = answer
            usage["total_tokens"] = len(first_part.prompt) + answer
            if details := usage.get("prompt_tokens_details"):
                details["cached_tokens"] = first_part.cached_tokens
                if first_part.plain.path == CHAT:  # completions do not have it
                    details["created_cache_tokens"] = first_part.written_tokens


def _chat_choice(choice: Json) -> Json:
    """Return the choice of a chat's event, from that of a completion's event."""
    is_last = choice["finish_reason"] is not None
    return {
        "index": choice["index"],
        "delta": {"content": choice["text"]},
        "logprobs": None,
        "finish_reason": choice["finish_reason"],
        **({"stop_reason": choice.get("stop_reason")} if is_last else {}),
        "token_ids": choice["token_ids"],
    }


def _event(fields: Json) -> bytes:
    return EVENT_BEGIN + msgspec.json.encode(fields) + b"\n\n"
