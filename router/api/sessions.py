"""Reads a request's session id, and the end of the session.

Invalid values in kvroute's own fields are refused. In fields of other APIs and of coding agents,
unknown values are ignored, because new versions of these APIs may have new values.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvroute.contract.keep import SESSION_BITS, hash_number
from kvroute.router.api.call_limits import MAX_NAME
from kvroute.router.api.calls import Call
from kvroute.router.api.errors import invalid, shown
from kvroute.router.api.parsing import as_utf8
from kvroute.router.sessions.turns import SessionHints

SESSION = "x-session-id"  # kvroute's own header with the session id
FINAL = "x-dynamo-session-final"  # header that is `true` in the last request of a session
# Headers of Codex with the id of a session, and of one of its threads.
CODEX, CODEX_THREAD = "session-id", "thread-id"
# Headers of coding agents with a session id, in order of precedence.
AGENTS = (
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    CODEX,
    "session_id",  # older versions of Codex
    "x-opencode-session",  # OpenCode, for providers whose name begins with "opencode"
    "x-session-affinity",  # OpenCode with other providers, and other agents
    "x-litellm-session-id",
    "x-correlation-id",
)
# Headers in which a sub-agent sends the id of the session that started it. Both then count as one
# session. Claude Code's sub-agents do not need this: they use the session id of their parent.
PARENTS = (
    "x-dynamo-parent-session-id",
    "x-parent-session-id",  # OpenCode
)
# Header of Codex with the id of the thread that started this one.
CODEX_PARENT = ("x-codex-parent-thread-id",)
# All headers that `hints_of` reads.
HEADERS = (SESSION, FINAL, *AGENTS, *PARENTS, CODEX_THREAD, *CODEX_PARENT)
USER_ID_MARK = "_session_"  # text before the session id in `user_id` of Claude Code before 2.1.78
MAX_USER = 1024  # longest `user_id` in characters; longer ones are ignored


def hints_of(
    headers: Mapping[str, str], call: Call, promises: Iterable[Callable[[Call], bool]] = ()
) -> SessionHints:
    """Return what a request says about its session.

    Args:
        promises: each returns whether the client promises a further turn.

    Raises:
        ApiError: the session id is not valid, or `session_end` is not a boolean.
    """
    id_, parent = _session_id(headers, call.body), _parent(headers)
    tenant = call.caller.tenant or call.cache_salt
    is_end = _is_end(call.body.get("session_end")) or headers.get(FINAL, "").lower() == "true"
    is_end = is_end or dynamos(call.body, "session_control").get("action") == "close"
    return SessionHints(
        session_number(call.cache_salt, parent or id_) if parent or id_ else 0,
        is_end and not parent,  # the end of a sub-agent is not the end of the session
        any(promise(call) for promise in promises),
        bool(call.body.get("tools")),
        hash_number(tenant, bits=31) if tenant else 0,
    )


def session_number(namespace: str, id_: str) -> int:
    """Return a hash of a session id, with SESSION_BITS bits. It is never 0.

    Args:
        namespace: the request's cache salt. Equal ids in two namespaces are different sessions.
    """
    return hash_number(f"{len(namespace)}|{namespace}{id_}", bits=SESSION_BITS)


def checked_id(name: str, value: object) -> str:
    """Check a session id and return it. Return "" if the value is None.

    Raises:
        ApiError: 400: the session id is not valid.
    """
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_NAME:
        expected = f"a string of up to {MAX_NAME} characters"
        raise invalid(name, f"{name} is {shown(value)}; expected {expected}")
    return value


def _session_id(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """Return the request's session id, or "" if there is none.

    kvroute's own field and header come first, then the headers of coding agents, then the fields of
    other APIs. Many sessions may share a `prompt_cache_key`, so it comes last.
    """
    own_id = checked_id("session_id", body.get("session_id"))
    if own_id := own_id or checked_id(SESSION, as_utf8(headers.get(SESSION, ""))):
        return own_id
    if any(headers.get(name) for name in AGENTS):
        return _first(headers, AGENTS)
    return (
        _short(dynamos(body, "session_control").get("session_id"))
        or _session_of_user(body.get("metadata"))
        or _short(body.get("prompt_cache_key"))
    )


def dynamos(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object in Dynamo's extension of a body, `nvext`; empty: there is none."""
    extension = body.get("nvext")
    found = extension.get(name) if isinstance(extension, dict) else None
    return found if isinstance(found, dict) else {}


def _parent(headers: Mapping[str, str]) -> str:
    """Return the id of the session that started this sub-agent, or "" if it is not a sub-agent.

    A sub-agent of Codex is a thread. It either belongs to the session of the thread that started
    it, or has a session of its own, with the same id as the thread.
    """
    has_own_session = headers.get(CODEX) == headers.get(CODEX_THREAD)
    return _first(headers, (*PARENTS, *(CODEX_PARENT if has_own_session else ())))


def _first(headers: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the value of the first of these headers that is set.

    Return "" if none is set, or if that value is too long.
    """
    for name in names:
        if value := as_utf8(headers.get(name, "")):
            return _short(value)
    return ""


def _short(value: object) -> str:
    """Return the value if it can be a session id, else ""."""
    return value if isinstance(value, str) and len(value) <= MAX_NAME else ""


def _session_of_user(metadata: object) -> str:
    """Return the session id in Claude Code's `user_id`, or "".

    The `user_id` is either a JSON object, or a text that ends with the session id.
    """
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
    return _short(session_id)


def _is_end(value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid("session_end", f"session_end is {shown(value)}; expected true or false")
