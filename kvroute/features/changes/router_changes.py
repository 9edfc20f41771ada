"""The changes in chats in the router of one model: what the core calls."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh32_intdigest

from kvroute.features.changes.change_checks import figures
from kvroute.features.changes.changed_places import PromptChanges
from kvroute.features.changes.chats import Chats
from kvroute.features.figure import Figure
from kvroute.features.router_feature import RouterFeature
from kvroute.router.api.calls import CHAT_COMPLETIONS, MESSAGES, RESPONSES
from kvroute.router.prompts.chat_template import without_header

if TYPE_CHECKING:
    from kvroute.blocks.fingerprint import MediaSpan
    from kvroute.contract.generation import TokenIds
    from kvroute.features.expanded import Expanded
    from kvroute.router.prompts.tokenizer import Prompts
    from kvroute.router.serving.rendering import RenderedCall
    from kvroute.router.sessions.breaks import Break

# Prompt tokens on each side of a change that are searched too, for marks such as "<total_tokens>".
CONTEXT_TOKENS = 12
MAX_TOKENS = 64  # longest change in tokens; longer text is not a date or a counter
# Each kind of text and its pattern. If several patterns match, the first one counts.
KINDS = (
    ("a count of the tokens that are left", re.compile(r"total_tokens|tokens (?:left|remaining)")),
    ("a time of day", re.compile(r"\d{1,2}:\d{2}")),
    ("a date", re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2}/\d{1,2}/\d{2,4}|(?:19|20)\d{2}")),
    ("an identifier", re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-|(?=\w*\d)[0-9a-f]{12,}")),
    ("a number", re.compile(r"\d")),
)


class RouterChanges(RouterFeature):
    """Compares the prompts of chats with those of their earlier turns."""

    name = "changes"

    def __init__(self, tokenizer: "Prompts") -> None:
        self._tokenizer = tokenizer
        self._chats = Chats()
        self.observer = self._places = PromptChanges()

    def change(
        self, expanded: "Expanded", rendered: "RenderedCall", variant: str, *, is_sent: bool
    ) -> "Break | None":
        call, opening = expanded.call, expanded.opening
        messages = conversation(call.path, call.body)
        if messages is None or expanded.has_more_messages:
            return None
        # Chats in different scopes share no cache.
        scope = f"{variant}|{opening.name if opening else ''}|{call.cache_salt}"
        prompt = rendered.token_ids[0]
        compare = self._chats.store if is_sent else self._chats.compare
        ids = with_image_numbers(prompt, rendered.media)
        broken = compare(messages, ids, tools=call.body.get("tools"), scope=scope)
        if broken and broken.difference.after.tokens <= MAX_TOKENS:
            text = self._tokenizer.decode(prompt[broken.difference.around(CONTEXT_TOKENS)])
            broken = replace(broken, kind=kind_of(text))
        return broken

    def state(self) -> Mapping[str, Any]:
        return self._places.as_json()

    async def figures(self) -> Sequence[Figure]:
        return figures(self._places.as_json())


def with_image_numbers(token_ids: "TokenIds", media: Sequence["MediaSpan"]) -> "TokenIds":
    """Return the token ids, with the tokens of each image replaced by a hash of the image.

    Without this, prompts with different images would be equal, since all images have the same
    placeholder tokens.
    """
    if not media:
        return token_ids
    numbered = token_ids.copy()
    for span in media:
        numbered[span.offset : span.end] = np.uint32(xxh32_intdigest(span.identifier.encode()))
    return numbered


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


def kind_of(text: str) -> str:
    """Return the kind of the changed text, such as a date, or "" if it is of no known kind.

    Reports and logs show the kind, because the text itself may be private.

    Args:
        text: the new text at the place of the change, with some of the prompt before and after it.
    """
    return next((kind for kind, pattern in KINDS if pattern.search(text)), "")
