"""Places system messages in the middle of a conversation where a chat template accepts them.

Such a message stays a system message if the template accepts one there. Otherwise it becomes a user
message. If the template accepts that neither, its text is joined to the message before it. Example
conversations are rendered to find out which of these works.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str]  # renders a chat; raises if the template rejects it
Place = Literal["system", "user", "joined"]  # how an inline system message is placed

INLINE = "Inline reminder 7351."
_CALL = {"id": "a23456789", "type": "function", "function": {"name": "f", "arguments": {}}}
_OPENING: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
]
_ANSWER: Message = {"role": "assistant", "content": "Hi."}
# Conversations that an inline message may follow: a question, and the result of a tool.
EXAMPLES: tuple[list[Message], ...] = (
    _OPENING,
    [*_OPENING, _ANSWER, {"role": "user", "content": "And now?"}],
    [
        *_OPENING,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "a23456789", "name": "f", "content": "Done."},
    ],
)


def place_for(render: Render) -> Place:
    """Return the first place with which all examples render correctly.

    This means: the conversation before the inline message renders as it does without the message.
    After it, the message's text occurs once, also if the conversation continues.
    """
    beginnings = [(before, text) for before in EXAMPLES if (text := _rendered(render, before))]
    roles: tuple[Place, ...] = ("system", "user") if beginnings else ()
    for role in roles:
        if all(_keeps(render, before, text, role) for before, text in beginnings):
            return role
    return "joined"


def _rendered(render: Render, messages: Sequence[Message]) -> str:
    """Return the rendered messages; an empty text if the template rejects them."""
    try:
        return render(messages)
    except Exception:  # an exception of Jinja, or of the template's own code
        return ""


def _keeps(render: Render, before: Sequence[Message], beginning: str, role: str) -> bool:
    inline = {"role": role, "content": INLINE}
    endings: tuple[list[Message], ...] = (
        [],
        [_ANSWER],
        [_ANSWER, {"role": "user", "content": "So?"}],
    )
    texts = [_rendered(render, [*before, inline, *ending]) for ending in endings]
    return all(
        text.startswith(beginning) and text[len(beginning) :].count(INLINE) == 1 for text in texts
    )


def put_in_place(messages: Sequence[Any], place: Place) -> list[Message]:
    """Return a chat's messages with all system messages placed, except one at the front."""
    if place == "system":
        return list(messages)
    return list(_joined(messages) if place == "joined" else _as_users(messages))


def _as_users(messages: Sequence[Any]) -> Iterator[Message]:
    for number, message in enumerate(messages):
        is_inline = number > 0 and message["role"] == "system"
        yield {**message, "role": "user"} if is_inline else message


def _joined(messages: Sequence[Any]) -> list[Message]:
    """Join each inline message to the user's or tool's message directly before it.

    If the message before it has another role, the inline message becomes a user message, and a
    user message that follows is joined to it.
    """
    placed: list[Message] = []
    is_opened = False  # True if the last message is an inline message that became a user message
    for message in messages:
        role = message["role"]
        is_inline = bool(placed) and role == "system"
        if is_inline and placed[-1]["role"] in ("user", "tool"):
            placed[-1] = _with_more(placed[-1], message["content"])
            continue  # is_opened does not change
        if is_inline:
            placed.append({**message, "role": "user"})
            is_opened = True
            continue
        if is_opened and role == "user":
            placed[-1] = _with_more(placed[-1], message["content"])
        else:
            placed.append(message)
        is_opened = False
    return placed


def _with_more(message: Mapping[str, Any], more: Any) -> Message:
    """Return a message with further content at its end: a text, or a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str) and isinstance(more, str):
        return {**message, "content": f"{content}\n\n{more}" if content else more}
    return {**message, "content": [*_parts(content), *_parts(more)]}


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)
