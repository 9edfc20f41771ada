"""Where system messages in the middle of a conversation go, by what a chat template takes.

Such a message stays a system message if the template takes one there; else it becomes a user
message; else its text is joined to the message before it. Which of these works is found by
rendering example conversations.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str]  # by the chat template; raises if it refuses
Place = Literal["system", "user", "joined"]  # what becomes of an inline system message

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
    """Return the first place in which every example renders as one would expect.

    That is: the conversation before the inline message renders as without it, and the message's
    text comes once, behind it, also when the conversation goes on.
    """
    beginnings = [(before, text) for before in EXAMPLES if (text := _tried(render, before))]
    roles: tuple[Place, ...] = ("system", "user") if beginnings else ()
    for role in roles:
        if all(_keeps(render, before, text, role) for before, text in beginnings):
            return role
    return "joined"


def _tried(render: Render, messages: Sequence[Message]) -> str:
    """Return the rendered messages; nothing if the template refuses them."""
    try:
        return render(messages)
    except Exception:  # Jinja's, or whatever a template's own code raises
        return ""


def _keeps(render: Render, before: Sequence[Message], beginning: str, role: str) -> bool:
    inline = {"role": role, "content": INLINE}
    more: tuple[list[Message], ...] = ([], [_ANSWER], [_ANSWER, {"role": "user", "content": "So?"}])
    wholes = [_tried(render, [*before, inline, *following]) for following in more]
    return all(
        whole.startswith(beginning) and whole[len(beginning) :].count(INLINE) == 1
        for whole in wholes
    )


def put_in_place(messages: Sequence[Any], place: Place) -> list[Message]:
    """Return a chat's messages with each system message but a first one put in its place."""
    if place == "system":
        return list(messages)
    return list(_joined(messages) if place == "joined" else _as_users(messages))


def _as_users(messages: Sequence[Any]) -> Iterator[Message]:
    for number, message in enumerate(messages):
        is_inline = number > 0 and message["role"] == "system"
        yield {**message, "role": "user"} if is_inline else message


def _joined(messages: Sequence[Any]) -> list[Message]:
    """Join each inline message to the user's or tool's message before it.

    Where there is none, it becomes a user's message, to which the next one is joined.
    """
    found: list[Message] = []
    is_opened = False  # the last message is an inline one that became a user's
    for message in messages:
        role = message["role"]
        is_inline = bool(found) and role == "system"
        if is_inline and found[-1]["role"] in ("user", "tool"):
            found[-1] = _with_more(found[-1], message["content"])
            continue  # what is opened stays so
        if is_inline:
            found.append({**message, "role": "user"})
            is_opened = True
            continue
        if is_opened and role == "user":
            found[-1] = _with_more(found[-1], message["content"])
        else:
            found.append(message)
        is_opened = False
    return found


def _with_more(message: Mapping[str, Any], more: Any) -> Message:
    """Return a message with further content, a text or a list of parts, at its end."""
    content = message.get("content") or ""
    if isinstance(content, str) and isinstance(more, str):
        return {**message, "content": f"{content}\n\n{more}" if content else more}
    return {**message, "content": [*_parts(content), *_parts(more)]}


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)
