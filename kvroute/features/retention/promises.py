"""The fields with which clients promise to send the beginning of a prompt again."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvroute.router.api.calls import Call, objects

# Values with which a client asks to keep a prompt in the cache. OpenAI's fields have other values,
# such as `in_memory`, which do not ask for this.
TTLS = ("5m", "30m", "1h", "24h")
# Fields whose items can have a `cache_control`.
CACHEABLE_FIELDS = ("system", "tools", "messages", "input")


def promises(call: Call) -> bool:
    """Return whether the client of a call promises to continue it.

    Unknown values are ignored, because new versions of these APIs may have new values.
    """
    return _is_marked(call) or _is_retained(call.body)


def _is_marked(call: Call) -> bool:
    """Return whether a `cache_control`, as in Anthropic's API, asks to keep part of the prompt."""
    if b"cache_control" not in call.raw:
        return False
    controls = (part.get("cache_control") for part in _cacheable(call.body))
    return any(
        isinstance(control, dict)
        and control.get("type") == "ephemeral"
        and control.get("ttl", "5m") in TTLS
        for control in controls
    )


def _cacheable(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield every object that can have a `cache_control`. Some clients send it in chats too."""
    yield body
    for name in CACHEABLE_FIELDS:
        for item in objects(body.get(name)):
            yield item
            yield from objects(item.get("content"))


def _is_retained(body: Mapping[str, Any]) -> bool:
    """Return whether OpenAI's fields ask to keep the prompt."""
    options = body.get("prompt_cache_options")
    ttl = options.get("ttl") if isinstance(options, dict) else None
    return ttl in TTLS or body.get("prompt_cache_retention") in TTLS
