"""The list of models in the form of Anthropic's API, for clients that send its version."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kvroute.router.api.errors import invalid, shown

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000  # models on one page
CURSORS = ("after_id", "before_id")  # fields of the query: the page begins after, or ends before


def info(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model in Anthropic's form.

    Args:
        card: the model in OpenAI's form.
    """
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat(),
        "lifecycle": "active",
        **dict.fromkeys(("max_input_tokens", "max_tokens"), card["max_model_len"]),
        **dict.fromkeys(("capabilities", "deprecated_at", "retires_at", "line")),
    }


def page(cards: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of the models.

    Args:
        cards: all models in OpenAI's form.
        query: the fields of the request's query: limit, after_id, before_id.

    Raises:
        ApiError: a field of the query is not valid.
    """
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LIMIT):
        raise invalid(
            "limit", f"limit is {shown(limit)}; expected a whole number from 1 to {MAX_LIMIT}"
        )
    ids = [card["id"] for card in cards]
    for name in CURSORS:
        if name in query and query[name] not in ids:
            raise invalid(name, f"{name} is {shown(query[name])}; expected the id of a model")
    start, end, size = 0, len(ids), int(limit)
    if "after_id" in query:
        start = ids.index(query["after_id"]) + 1
    if "before_id" in query:
        end = ids.index(query["before_id"])
    is_backwards = "before_id" in query and "after_id" not in query
    first = max(start, end - size) if is_backwards else start
    last = end if is_backwards else min(end, start + size)
    shown_ids = ids[first:last]
    return {
        "data": [info(card) for card in cards[first:last]],
        "has_more": first > start if is_backwards else last < end,
        "first_id": shown_ids[0] if shown_ids else None,
        "last_id": shown_ids[-1] if shown_ids else None,
    }
