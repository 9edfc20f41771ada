"""Reads the messages from a call's body, in the same form for each chat API."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvroute.router.api.calls import CHAT_COMPLETIONS, MESSAGES, RESPONSES
from kvroute.router.prompts.chat_template import without_header


def conversation(path: str, body: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return all messages of a chat, the system message first.

    Some APIs have the system message in a separate field, such as `system` or `instructions`.

    Returns:
        None if the body is not a chat, or continues a stored response.
    """
    if path == CHAT_COMPLETIONS:
        given, instructions = body.get("messages"), None
    elif path == MESSAGES:
        given, instructions = body.get("messages"), body.get("system")
    elif path == RESPONSES and body.get("previous_response_id") is None:
        given, instructions = body.get("input"), body.get("instructions")
    else:
        return None
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        return None
    first = [{"role": "system", "content": instructions}] if instructions else []
    return [_rendered(message) for message in [*first, *given]]


def _rendered(message: Any) -> Any:
    """Return a message. Remove billing headers from a system message, as rendering does."""
    if not isinstance(message, dict) or message.get("role") != "system":
        return message
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return message
    parts = [without_header(part) if isinstance(part, dict) else part for part in content]
    return {**message, "content": [part for part in parts if part is not None]}
