"""What a client says of its conversation, by its body and its headers.

Our own fields are checked. Those of other APIs and of agents are read as far as they can be, and
never refused: their next versions may have other values.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvroute.contract.keep import SESSION_BITS, number_of, tenant_number
from kvroute.keys.keyring import tenant_of
from kvroute.router.api.calls import MAX_NAME, Call, objects
from kvroute.router.api.errors import invalid, shown
from kvroute.router.sessions.returns import Said

SESSION = "x-session-id"
FINAL = "x-dynamo-session-final"  # true: no further request of the session comes
CODEX, CODEX_THREAD = "session-id", "thread-id"  # a session may have several threads
AGENTS = (  # headers of coding agents, in place of ours
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    CODEX,
    "session_id",  # older versions of it
    "x-opencode-session",  # where the provider's name begins with opencode
    "x-session-affinity",  # OpenCode elsewhere, and others
)
# Headers in which a sub-agent with a session id of its own names the session that has started it.
# Both are one family then, with one seat. Claude Code's sub-agents have no session of their own.
PARENTS = (
    "x-dynamo-parent-session-id",
    "x-parent-session-id",  # OpenCode
)
CODEX_PARENT = ("x-codex-parent-thread-id",)
SUFFIX = "_session_"  # of the `user_id` of Claude Code before 2.1.78; then comes the id
MOST_USER = 1024  # characters of a `user_id` that may have a session's id in it
TTLS = ("5m", "30m", "1h", "24h")  # of promises; OpenAI's `in_memory` promises nothing
CACHED = ("system", "tools", "messages", "input")  # lists that may have marks of what to keep


def said_of(headers: Mapping[str, str], call: Call) -> Said:
    """ApiError for a session id that is none, or a `session_end` that is no boolean."""
    id_, parent = _session_id(headers, call.body), _parent(headers)
    is_end = _is_end(call.body.get("session_end")) or headers.get(FINAL, "").lower() == "true"
    return Said(
        session_number(call.cache_salt, parent or id_) if parent or id_ else 0,
        is_end and not parent,  # the family goes on
        _is_marked(call) or _is_retained(call.body),
        bool(call.body.get("tools")),
        tenant_number(tenant_of(call.caller) or call.cache_salt),
    )


def session_number(namespace: str, id_: str) -> int:
    """Of SESSION_BITS, not 0. Equal ids of two namespaces have different ones."""
    return number_of(f"{len(namespace)}|{namespace}{id_}", bits=SESSION_BITS)


def checked_id(name: str, value: object) -> str:
    """A session's id; empty if there is none. ApiError."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_NAME:
        expected = f"a string of up to {MAX_NAME} characters"
        raise invalid(name, f"{name} is {shown(value)}; expected {expected}")
    return value


def _session_id(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """The most explicit one; empty if there is none. ApiError."""
    own = checked_id("session_id", body.get("session_id"))
    if own := own or checked_id(SESSION, _header(headers, SESSION)):
        return own
    if any(headers.get(name) for name in AGENTS):
        return _first(headers, AGENTS)
    return _session_of_user(body.get("metadata"))


def _parent(headers: Mapping[str, str]) -> str:
    """Return the session that has started this one, which is a sub-agent's; empty: it is none.

    A sub-agent of Codex is a thread. It is of the session of the thread that has started it, or has
    a session of its own, with the thread's id.
    """
    is_own = headers.get(CODEX) == headers.get(CODEX_THREAD)
    return _first(headers, (*PARENTS, *(CODEX_PARENT if is_own else ())))


def _first(headers: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the first of these headers that is there; empty if it is none, or too long."""
    for name in names:
        if given := _header(headers, name):
            return given if len(given) <= MAX_NAME else ""
    return ""


def _header(headers: Mapping[str, str], name: str) -> str | None:
    """As in a body or a path: its bytes, which are read as Latin-1, are mostly UTF-8."""
    value = headers.get(name)
    if value is None or value.isascii():
        return value
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value


def _session_of_user(metadata: object) -> str:
    """Of Claude Code: its `user_id` is JSON with the session's id, or ends with it."""
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user, str) or len(user) > MOST_USER:
        return ""
    if not user.startswith("{"):
        found: object = user.partition(SUFFIX)[2]
    else:
        try:
            found = msgspec.json.decode(user).get("session_id")
        except (ValueError, RecursionError):
            return ""
    return found if isinstance(found, str) and len(found) <= MAX_NAME else ""


def _is_end(value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid("session_end", f"session_end is {shown(value)}; expected true or false")


def _is_marked(call: Call) -> bool:
    """Return whether Anthropic's `cache_control` asks to keep some of the prompt."""
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
    """All that can have a `cache_control`; some send it in chats, too."""
    yield body
    for name in CACHED:
        for each in objects(body.get(name)):
            yield each
            yield from objects(each.get("content"))


def _is_retained(body: Mapping[str, Any]) -> bool:
    """Return whether OpenAI's fields ask to keep the prompt."""
    options = body.get("prompt_cache_options")
    ttl = options.get("ttl") if isinstance(options, dict) else None
    return ttl in TTLS or body.get("prompt_cache_retention") in TTLS
