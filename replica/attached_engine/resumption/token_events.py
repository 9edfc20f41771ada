"""Reads the token ids of a stream's events, and hides them from a client that did not ask."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.replica.attached_engine.server_bodies import CHAT

# The lists of token ids in an event. Without `return_token_ids`, vLLM sends null in their place. In
# a text, the quotation marks would be escaped.
ID_LISTS = re.compile(rb'"((?:prompt_)?token_ids)":\[[0-9,]*\]')
NO_IDS = rb'"\1":null'
EMPTY_DELTA, NOT_LAST = b'"delta":{}', b'"finish_reason":null'
EVENT_BEGIN, DONE = b"data: ", b"[DONE]"
# Route -> what vLLM puts before the id of a request in the events of its answer.
ID_PREFIXES = {CHAT: "chatcmpl-"}
USUAL_PREFIX = "cmpl-"
ABORTED = "abort"  # the finish reason of an answer that vLLM gave up, for example when it stops


class ReadEvent(NamedTuple):
    """An event of a server, as the client gets it."""

    data: bytes
    token_ids: Sequence[int] | None = ()  # the answer's tokens in it; None: they are unknown
    text_chars: int = 0  # characters of the answer's text in it
    # True: the event waits for the next event with tokens, or for the end of the stream. So the
    # tokens that were sent tell another server exactly which events were sent.
    is_held: bool = False


class EventReader(Protocol):
    """Reads the events of one stream."""

    @property
    def can_continue(self) -> bool:
        """Return whether another server can continue after the events that were read."""
        ...

    @property
    def has_failed(self) -> bool:
        """Return whether the server has ended the answer with an error."""
        ...

    @property
    def is_cut(self) -> bool:
        """Return whether the rest of the stream is not needed."""
        ...

    @property
    def created(self) -> int:
        """Return the Unix time in the events; 0: no event was read yet."""
        ...

    def read(self, event: bytes) -> ReadEvent: ...


class _ServerChoice(Struct):
    index: int
    text: str | None = None
    delta: dict[str, Any] | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _ServerEvent(Struct):
    id: str = ""
    created: int = 0
    choices: list[_ServerChoice] = []
    prompt_token_ids: list[int] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_ServerEvent).decode


class TokenEvents:
    """The events of a server that was asked for token ids.

    An event of an unknown form passes as it is. No other server can continue after it.

    Args:
        path: The route.
        request_id: The id of the request at the server.
        prompt: The token ids that the prompt should have.
        shows_ids: Whether the client has asked for the token ids.
    """

    is_cut = False

    def __init__(
        self, path: str, request_id: str, prompt: Sequence[int], *, shows_ids: bool
    ) -> None:
        self.can_continue = True
        self.has_failed = False
        self.created = 0
        self._is_chat = path == CHAT
        self._id = answer_id(path, request_id)
        self._prompt: Sequence[int] | None = prompt  # until it is compared with the server's
        self._shows_ids = shows_ids
        self._has_ended = False  # whether an event had a finish reason

    def read(self, event: bytes) -> ReadEvent:
        """Return the event for the client, with its tokens."""
        data = event if self._shows_ids else ID_LISTS.sub(NO_IDS, event)
        if not self._shows_ids and self._is_chat and EMPTY_DELTA in event and NOT_LAST in event:
            # vLLM sends this event only because of its token ids: a parser holds back their text.
            self.can_continue, data = False, b""
        if self.can_continue and (read := self._understood(event, data)) is not None:
            return read
        self.can_continue = False
        return ReadEvent(data, None)

    def _understood(self, event: bytes, data: bytes) -> ReadEvent | None:
        """Return an event of a known form; None: its form is unknown."""
        if not event.startswith(EVENT_BEGIN):
            return None
        payload = event.removeprefix(EVENT_BEGIN).rstrip()
        if payload == DONE:
            return ReadEvent(data, is_held=True) if self._has_ended or self.has_failed else None
        try:
            parsed = _decode(payload)
        except DECODE_ERRORS:
            return None
        if parsed.error is not None:
            self.has_failed = True
            return ReadEvent(data, is_held=True)
        if not parsed.choices:
            return ReadEvent(data, is_held=True) if self._has_ended else None
        choice = parsed.choices[0]
        if len(parsed.choices) > 1 or choice.index or choice.logprobs is not None:
            return None
        if self._has_ended or parsed.id != self._id or not self._is_prompt(parsed, choice):
            return None
        self.created = parsed.created
        return self._of_choice(choice, data)

    def _is_prompt(self, event: _ServerEvent, choice: _ServerChoice) -> bool:
        """Return whether the server has the prompt that the router knows; the first event says."""
        expected, self._prompt = self._prompt, None
        if expected is None:
            return True
        return (choice.prompt_token_ids or event.prompt_token_ids) == [*expected]

    def _of_choice(self, choice: _ServerChoice, data: bytes) -> ReadEvent | None:
        if choice.token_ids is None:  # the first event of a chat has the role only
            is_role = choice.delta is not None and choice.delta.keys() == {"role", "content"}
            is_first = is_role and not (choice.delta or {})["content"]
            return ReadEvent(data, is_held=True) if is_first else None
        text = choice.text
        if self._is_chat:
            is_text = choice.delta is not None and choice.delta.keys() == {"content"}
            text = (choice.delta or {})["content"] if is_text else None
        if not isinstance(text, str):
            return None
        self._has_ended = choice.finish_reason is not None
        self.has_failed = choice.finish_reason == ABORTED
        is_held = self._has_ended or not choice.token_ids
        return ReadEvent(data, tuple(choice.token_ids), len(text), is_held)


def answer_id(path: str, request_id: str) -> str:
    """Return the id in the events of the answer to a request."""
    return ID_PREFIXES.get(path, USUAL_PREFIX) + request_id
