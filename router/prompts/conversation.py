"""Reads the messages of a chat from a call's body, in one form for all chat APIs."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvroute.router.api.calls import CHAT_COMPLETIONS, MESSAGES, RESPONSES
from kvroute.router.prompts.chat_template import without_header


def conversation(path: str, body: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return all messages of a chat, the system message first.

    Some APIs have the system message in a separate field, such as `system` or `instructions`.

    Returns:
        None if the body is not a chat.
    """
    if path == CHAT_COMPLETIONS:
        messages, instructions = body.get("messages"), None
    elif path == MESSAGES:
        messages, instructions = body.get("messages"), body.get("system")
    elif path == RESPONSES:
        messages, instructions = body.get("input"), body.get("instructions")
    else:
        return None
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        return None
    system = [{"role": "system", "content": instructions}] if instructions else []
    return [_without_headers(message) for message in [*system, *messages]]


def _without_headers(message: Any) -> Any:
    """Return the message. Billing headers are removed from system messages, as in rendering."""
    if not isinstance(message, dict) or message.get("role") != "system":
        return message
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return message
    parts = [without_header(part) if isinstance(part, dict) else part for part in content]
    return {**message, "content": [part for part in parts if part is not None]}
