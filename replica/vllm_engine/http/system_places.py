"""Adapts inline system messages, those in the middle of a conversation, to a chat template.

An inline message stays a system message if the template accepts one there. Otherwise it becomes a
user message. If the template does not accept that either, its text is joined to the message before
it. To find out which of these works, example conversations are rendered.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

Message = dict[str, Any]
# Renders a chat. Raises any exception if the template rejects it.
Render = Callable[[Sequence[Message]], str]
Place = Literal["system", "user", "joined"]  # how an inline system message is placed

INLINE = "Inline reminder 7351."  # text of the inline message in the examples
_CALL = {"id": "a23456789", "type": "function", "function": {"name": "f", "arguments": {}}}
_OPENING: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
]
_ANSWER: Message = {"role": "assistant", "content": "Hi."}
# Conversations that an inline message may follow: they end with a question or a tool's result.
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
    """Return the first place with which all examples are rendered correctly.

    An example is rendered correctly if the inline message does not change the text before it, and
    if the message's own text follows exactly once. Both must also be true if the conversation
    continues after the inline message.
    """
    # The template may reject some examples, such as those with tools, even without the message.
    beginnings = [(before, text) for before in EXAMPLES if (text := _rendered(render, before))]
    roles: tuple[Place, ...] = ("system", "user") if beginnings else ()
    for role in roles:
        if all(_renders_correctly(render, before, text, role) for before, text in beginnings):
            return role
    return "joined"


def _rendered(render: Render, messages: Sequence[Message]) -> str:
    """Return the text of the messages, or an empty text if the template rejects them."""
    try:
        return render(messages)
    except Exception:  # Jinja and the template's own code can raise any exception
        return ""


def _renders_correctly(
    render: Render, before: Sequence[Message], beginning: str, role: str
) -> bool:
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
    """Return a chat's messages with all inline system messages changed as `place` says.

    A system message at the front does not change.
    """
    if place == "system":
        return list(messages)
    return list(_joined(messages) if place == "joined" else _as_users(messages))


def _as_users(messages: Sequence[Any]) -> Iterator[Message]:
    for number, message in enumerate(messages):
        is_inline = number > 0 and message["role"] == "system"
        yield {**message, "role": "user"} if is_inline else message


def _joined(messages: Sequence[Any]) -> list[Message]:
    """Join each inline message to the message directly before it, if a user or a tool sent that.

    Otherwise the inline message becomes a user message. If a user message follows, the two become
    one message.
    """
    placed: list[Message] = []
    is_opened = False  # whether the last message is an inline message that became a user message
    for message in messages:
        role = message["role"]
        is_inline = bool(placed) and role == "system"
        if is_inline and placed[-1]["role"] in ("user", "tool"):
            placed[-1] = _with_more(placed[-1], message["content"])
            continue
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
    """Return the message with `more`, a text or a list of parts, appended to its content."""
    content = message.get("content") or ""
    if isinstance(content, str) and isinstance(more, str):
        return {**message, "content": f"{content}\n\n{more}" if content else more}
    return {**message, "content": [*_parts(content), *_parts(more)]}


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)
