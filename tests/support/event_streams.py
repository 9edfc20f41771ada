"""Compares streams of events by their content."""

import json
from collections import defaultdict
from typing import Any

TEXTS = {"text", "content", "delta", "partial_json", "arguments", "thinking", "reasoning"}
LISTS = {"logprobs", "token_ids"}  # fields with an entry for each token


class Joined:
    """A stream of events in a form that does not depend on where the answer was cut into events.

    Events of a busy engine have several tokens each, and the last event may have a text or not. So
    consecutive events are joined if they differ only in their texts and in their entries for
    tokens. Comments, which a router sends while an answer waits, do not count.
    """

    def __init__(self, stream: str) -> None:
        self.frames: list[Any] = []  # the events without the content of `parts`
        self.parts: dict[str, list[Any]] = defaultdict(list)  # path in the event -> contents
        self.numbers: list[int] = []  # sequence numbers of events of the Responses API
        for event in stream.split("\n\n"):
            if not event or event.startswith(":"):
                continue
            *names, data = event.splitlines()
            payload = data.removeprefix("data: ")
            frame = (names, payload if payload == "[DONE]" else self._frame(json.loads(payload)))
            if frame not in self.frames[-1:]:
                self.frames.append(frame)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Joined) and self._all() == other._all()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return json.dumps(self._all(), ensure_ascii=False, indent=1)

    def _all(self) -> Any:
        parts = {
            place: "".join(part) if isinstance(part[0], str) else part
            for place, part in self.parts.items()
            if part
        }
        is_counted = self.numbers == list(range(len(self.numbers)))
        return [list(self.frames), parts, is_counted]

    def _frame(self, value: Any, place: str = "") -> Any:
        if isinstance(value, list):
            return [self._frame(item, f"{place}.{i}") for i, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        frame: dict[str, Any] = {}
        for name, inner in value.items():
            where = f"{place}.{name}"
            if name in TEXTS and isinstance(inner, str):
                self.parts[where].append(inner)
            elif name in LISTS:
                self._join(inner, where)
            elif name == "sequence_number":
                self.numbers.append(inner)
            else:
                frame[name] = self._frame(inner, where)
        return frame

    def _join(self, entries_of_tokens: Any, where: str) -> None:
        """Add a list with an entry for each token, or several such lists by name."""
        is_named = isinstance(entries_of_tokens, dict)
        lists = entries_of_tokens if is_named else {"": entries_of_tokens}
        for name, entries in lists.items():
            self.parts[f"{where}.{name}"] += entries or []
