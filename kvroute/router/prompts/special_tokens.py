"""What clients write in messages becomes no special token.

A tokenizer makes a special token of the text `<|im_end|>`, whoever has written it. So a client's
strings get an invisible character behind the first one of each such text, before anything renders
them: routers and replicas then render the same, and a model reads the same.

A text may also arise where a template puts two strings one behind the other. So the beginning of a
special token is broken too where a string ends with it, white space aside: templates trim.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from pydantic_core import from_json

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.router.api.calls import CHATS, COMPLETIONS, MEDIA, MESSAGES, RESPONSES, Call
from kvroute.router.api.errors import invalid, shown
from kvroute.router.api.response_object import members
from kvroute.router.prompts.segments import any_of

BREAKS = ("\u2060", "\u200b", " ")  # the first of them that the tokenizer knows
CHAT = ("messages", "system", "tools", "documents", "chat_template_kwargs", "reasoning_effort")
FIELDS = {  # of bodies, which come into prompts
    CHATS: CHAT,
    MESSAGES: CHAT,
    f"{MESSAGES}/count_tokens": CHAT,
    "/tokenize": CHAT,
    RESPONSES: (*CHAT, "input", "instructions", "previous_input_messages"),
    COMPLETIONS: (),
}
OTHER_FIELDS = ("messages",)  # of other routes
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PIECE = 1 << 16  # characters that are searched at a time, then other threads may run
TAG = re.compile(r"</?\w+>")  # such as <think>, by which templates take answers apart
ROLE = re.compile(r"[\w-]+")
BRACKETED = re.compile(r"[<\[{(].*[>\])}]", re.DOTALL)


class SpecialTokens:
    """Those of one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        """Those with a role in prompts: all that the tokenizer calls special, and its other ones
        that the template writes, except tags."""
        backend = tokenizer.backend_tokenizer
        tokens = _special(tokenizer, template)
        self._break = _break(backend, tokens)
        self._tokens = sorted(tokens)
        self._heads = frozenset(token[:end] for token in tokens for end in range(1, len(token)))
        self._longest = max(map(len, self._heads), default=0)
        self._starts = re.compile(_starts(tokens))
        self._hints = {b"\\u", *(_hint(token[0]) for token in tokens)}
        self._suspects = re.compile(_suspects(tokens))

    def escaped(self, call: Call) -> Call:
        """The call without them. ApiError for a role that would become part of one, and for values
        in values without end."""
        names = FIELDS.get(call.path, OTHER_FIELDS)
        for name in names:
            self._check_roles(call.body.get(name))
        if not names or not self.may_be_in(call.raw):
            return call
        try:
            fields = members(call.raw)
            given = {name: from_json(bytes(fields[name])) for name in names if name in fields}
        except (ValueError, *DECODE_ERRORS):
            return call  # no JSON, by a conversation's other writer: a replica refuses it
        try:
            changed = {
                name: after
                for name, before in given.items()
                if (after := self._field(before)) != before
            }
        except RecursionError:
            raise invalid(None, "the body has too many values in values; send fewer") from None
        if not changed:
            return call
        written = {name: msgspec.Raw(_json(value)) for name, value in changed.items()}
        raw = msgspec.json.encode({**fields, **written})
        return replace(call, raw=raw, body={**call.body, **changed})

    def may_be_in(self, raw: bytes) -> bool:
        """Whether a body may have one, however it is written; False for nearly all that have
        none."""
        if not any(hint in raw for hint in self._hints):
            return False
        size, overlap = PIECE, 8  # bytes; the longest text that is looked for has 6
        return any(
            self._suspects.search(raw, start, start + size + overlap)
            for start in range(0, len(raw), size)
        )

    def text(self, text: str, *, may_go_on: bool = True) -> str:
        """The text without any. may_go_on: more text may follow it in the prompt."""
        pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
        found = [self._starts.sub(self._broken, piece) for piece in pieces]
        last = len(found) - 1
        return "".join(
            self._ended(piece) if may_go_on or number < last else piece
            for number, piece in enumerate(found)
        )

    def _broken(self, start: re.Match[str]) -> str:
        return start[0] + self._break

    def _ended(self, text: str) -> str:
        """With a break in each beginning of a token at its end."""
        body = text.rstrip()
        rest = text[len(body) :]
        for length in range(min(self._longest, len(body)), 0, -1):
            if body[-length:] in self._heads:
                behind_first = len(body) - length + 1
                body = body[:behind_first] + self._break + body[behind_first:]
        return body + rest

    def _field(self, value: Any) -> Any:
        if not isinstance(value, list) or not value or not _is_answer(value[-1]):
            return self._value(value)
        *before, last = value
        return [*self._value(before), self._begun(last)]

    def _begun(self, answer: Mapping[str, Any]) -> Any:
        """An answer that the model may have to go on with: nothing of a client's comes behind."""
        content = answer["content"]
        rest = self._value({k: v for k, v in answer.items() if k != "content"})
        if isinstance(content, str):
            ended: Any = self.text(content, may_go_on=False)
        else:
            *parts, last = content
            text = {"text": self.text(last["text"], may_go_on=False)}
            ended = [*self._value(parts), self._value({**last, "text": ""}) | text]
        return {**rest, "content": ended}

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self._value(each) for each in value]
        if isinstance(value, dict):
            return {self.text(name): self._member(name, each) for name, each in value.items()}
        return value

    def _member(self, name: str, value: Any) -> Any:
        if name in MEDIA:
            return value
        if name == "arguments" and isinstance(value, str):
            return self._arguments(value)
        return self._value(value)

    def _arguments(self, text: str) -> str:
        """A tool call's, which are JSON in a string: templates get what they mean."""
        try:
            before = json.loads(text)  # as vLLM does
        except ValueError:
            before = None
        if not isinstance(before, dict | list):
            return self.text(text)
        after = self._value(before)
        return text if after == before else json.dumps(after)

    def _check_roles(self, messages: Any) -> None:
        """Some templates write <|role|>."""
        for message in messages if isinstance(messages, list) else ():
            role = message.get("role") if isinstance(message, dict) else None
            if isinstance(role, str) and role not in KNOWN_ROLES:
                self._check_role(role)

    def _check_role(self, role: str) -> None:
        if not ROLE.fullmatch(role) or any(role in token for token in self._tokens):
            raise invalid(
                "messages", f"role is {shown(role)}; expected one of {', '.join(KNOWN_ROLES)}"
            )


def _is_answer(message: Any) -> bool:
    """Whether it is an assistant's message that ends with text."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return False
    content = message.get("content")
    last = content[-1] if isinstance(content, list) and content else None
    is_text = isinstance(last, dict) and isinstance(last.get("text"), str)
    return isinstance(content, str) or is_text


def _special(tokenizer: Any, template: str) -> set[str]:
    found = set[str](tokenizer.all_special_tokens)
    for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values():
        text = token.content
        is_mark = text in template and BRACKETED.fullmatch(text) and not TAG.fullmatch(text)
        if token.special or is_mark:
            found.add(text)
    return {token for token in found if len(token) > 1 and not token.isspace()}


def _break(backend: Any, tokens: Iterable[str]) -> str:
    """What makes fewest special tokens of broken ones; usually none."""
    numbers = {backend.token_to_id(token) for token in tokens}

    def remaining(broken_by: str) -> int:
        texts = [token[0] + broken_by + token[1:] for token in tokens]
        encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
        return sum(id_ in numbers for encoding in encoded for id_ in encoding.ids)

    return min(BREAKS, key=remaining)


def _by_start(tokens: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """First characters, and what follows them."""
    for first in sorted({token[0] for token in tokens}):
        yield first, [token[1:] for token in tokens if token[0] == first]


def _starts(tokens: Iterable[str]) -> str:
    """A pattern of the first characters of tokens."""
    rests = [f"{re.escape(first)}(?={any_of(rest)})" for first, rest in _by_start(tokens)]
    return "|".join(rests) or r"(?!)"


def _suspects(tokens: Iterable[str]) -> bytes:
    """A pattern of what a body has that has a token, or a string that ends with a token's
    beginning: two characters, of which either may be escaped."""
    patterns = []
    for first, rest in _by_start(tokens):
        seconds = {re.escape(each.encode()[:1]) for each in rest}
        behind = b"(?:" + b"|".join(sorted(seconds | {rb'["\\\s]', rb"[\xc2\xe1-\xe3]"})) + b")"
        code = first.encode("utf-16-be")[:2].hex()
        escape = rb"\\u(?i:" + code.encode() + b")"
        patterns += [re.escape(first.encode()) + behind, escape]
        if first in '"\\/' or first < " ":
            patterns.append(rb"\\[\"\\/bfnrt]")
    return b"|".join(patterns) or rb"(?!)"


def _hint(first: str) -> bytes:
    """What is in each body that has the character without a \\u."""
    return b"\\" if first < " " else first.encode()


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
