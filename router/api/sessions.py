"""Reads the session id, the end of the session and cache hints from a request's body and headers.

kvroute's own fields are checked. Unknown values in fields of other APIs and of coding agents are
ignored and never rejected, since new versions of these APIs may have new values.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvroute.contract.keep import SESSION_BITS, hash_number, tenant_number
from kvroute.keys.keyring import tenant_of
from kvroute.router.api.call_limits import MAX_NAME
from kvroute.router.api.calls import Call, objects
from kvroute.router.api.errors import invalid, shown
from kvroute.router.sessions.returns import SessionHints

SESSION = "x-session-id"
FINAL = "x-dynamo-session-final"  # header; true: this is the session's last request
CODEX, CODEX_THREAD = "session-id", "thread-id"  # a session of Codex may have several threads
AGENTS = (  # headers of coding agents that hold a session id, in order of precedence
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    CODEX,
    "session_id",  # older versions of Codex
    "x-opencode-session",  # OpenCode, for providers whose name begins with "opencode"
    "x-session-affinity",  # OpenCode with other providers, and other agents
)
# Headers in which a sub-agent with its own session id sends the id of the session that started it.
# Parent and sub-agent then count as one session. Claude Code's sub-agents have no own session id.
PARENTS = (
    "x-dynamo-parent-session-id",
    "x-parent-session-id",  # OpenCode
)
CODEX_PARENT = ("x-codex-parent-thread-id",)
USER_ID_MARK = "_session_"  # stands before the session id in `user_id` of Claude Code < 2.1.78
MAX_USER = 1024  # characters of a `user_id`; longer ones are ignored
TTLS = (
    "5m",
    "30m",
    "1h",
    "24h",
)  # TTLs that ask to keep a prompt; OpenAI's `in_memory` does not ask
CACHEABLE_FIELDS = ("system", "tools", "messages", "input")  # their items can have `cache_control`


def hints_of(headers: Mapping[str, str], call: Call) -> SessionHints:
    """Return the session, its end and the cache hints that a request sends.

    Raises:
        ApiError: the session id is not valid, or `session_end` is not a boolean.
    """
    id_, parent = _session_id(headers, call.body), _parent(headers)
    is_end = _is_end(call.body.get("session_end")) or headers.get(FINAL, "").lower() == "true"
    return SessionHints(
        session_number(call.cache_salt, parent or id_) if parent or id_ else 0,
        is_end and not parent,  # the end of a sub-agent is not the end of the session
        _is_marked(call) or _is_retained(call.body),
        bool(call.body.get("tools")),
        tenant_number(tenant_of(call.caller) or call.cache_salt),
    )


def session_number(namespace: str, id_: str) -> int:
    """Return a number of SESSION_BITS bits for a session id in a namespace; it is never 0."""
    return hash_number(f"{len(namespace)}|{namespace}{id_}", bits=SESSION_BITS)


def checked_id(name: str, value: object) -> str:
    """Return a session id; empty if the value is None. It raises ApiError if it is not valid."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_NAME:
        expected = f"a string of up to {MAX_NAME} characters"
        raise invalid(name, f"{name} is {shown(value)}; expected {expected}")
    return value


def _session_id(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """Return the session id of the most specific field or header; empty if there is none."""
    own_id = checked_id("session_id", body.get("session_id"))
    if own_id := own_id or checked_id(SESSION, _header(headers, SESSION)):
        return own_id
    if any(headers.get(name) for name in AGENTS):
        return _first(headers, AGENTS)
    return _session_of_user(body.get("metadata"))


def _parent(headers: Mapping[str, str]) -> str:
    """Return the id of the session that started this sub-agent; empty if it is not a sub-agent.

    A sub-agent of Codex is a thread. Its session is either the session of the thread that started
    it, or its own one, whose id is the thread's id.
    """
    has_own_session = headers.get(CODEX) == headers.get(CODEX_THREAD)
    return _first(headers, (*PARENTS, *(CODEX_PARENT if has_own_session else ())))


def _first(headers: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the value of the first header that is set; empty if none is, or it is too long."""
    for name in names:
        if value := _header(headers, name):
            return value if len(value) <= MAX_NAME else ""
    return ""


def _header(headers: Mapping[str, str], name: str) -> str | None:
    """Return a header as UTF-8 text, like the text of bodies and paths.

    The server decodes headers as Latin-1. A value that is not UTF-8 stays as it is.
    """
    value = headers.get(name)
    if value is None or value.isascii():
        return value
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value


def _session_of_user(metadata: object) -> str:
    """Return the session id in Claude Code's `user_id`, which is JSON or ends with the id."""
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user, str) or len(user) > MAX_USER:
        return ""
    if not user.startswith("{"):
        session_id: object = user.partition(USER_ID_MARK)[2]
    else:
        try:
            session_id = msgspec.json.decode(user).get("session_id")
        except (ValueError, RecursionError):
            return ""
    return session_id if isinstance(session_id, str) and len(session_id) <= MAX_NAME else ""


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
    """Yield every object that can have a `cache_control`, which some clients send in chats too."""
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
