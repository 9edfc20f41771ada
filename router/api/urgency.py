"""Reads from a request's headers, body and API key how long it can wait."""

import math
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from kvroute.contract.priority import PRIORITIES, Priority, less_urgent, parse_priority
from kvroute.keys.keyring import Caller
from kvroute.router.admission.waits import Urgency
from kvroute.router.api.errors import ApiError, invalid, shown

PRIORITY = "x-kvroute-priority"  # header: one of PRIORITIES
DEADLINE = "x-kvroute-deadline-s"  # header: seconds within which a replica must start the request
EARLIEST_S, LATEST_S = -60.0, 3600.0  # smallest and largest `priority` of a body, in seconds
MAX_DEADLINE_S = 1e6  # longest deadline; a longer one is cut to this
MAX_USER = 64  # characters of a user's name; longer names are hashed


def urgency_of(
    headers: Mapping[str, str], body: Mapping[str, Any], caller: Caller | None, *, most_s: float
) -> Urgency:
    """Return the request's urgency, which is never higher than that of its API key.

    `most_s` is the limit of --max-wait-s; 0 means no limit.

    Raises:
        ApiError: the priority or the deadline is not valid.
    """
    requested = _priority(headers.get(PRIORITY))
    own_s = _deadline_s(headers.get(DEADLINE), body.get("timeout"))
    later_s = _later_s(body.get("priority"))
    if caller is not None:
        requested = less_urgent(caller.priority, requested or caller.priority)
        later_s = max(0.0, later_s)
    priority = requested or "default"
    bound_s = math.inf if priority == "batch" or not most_s else most_s
    deadline_s = own_s or math.inf
    if own_s is not None and own_s >= bound_s:
        own_s = None  # the limit of the queue is shorter
    return Urgency(priority, later_s, own_s or bound_s, own_s, deadline_s)


def sharer_of(caller: Caller | None, user: object) -> str:
    """Return the name for which the queue counts a fair share: the tenant, or the body's user.

    It is empty if the request has neither.
    """
    if caller is not None:
        return caller.tenant
    if not isinstance(user, str) or len(user) <= MAX_USER:
        return user if isinstance(user, str) else ""
    return blake2b(user.encode(errors="replace"), digest_size=16).hexdigest()


def _priority(given: str | None) -> Priority | None:
    if given is None:
        return None
    priority = parse_priority(given)
    if priority is None:
        raise _invalid(PRIORITY, given, f"one of {', '.join(PRIORITIES)}")
    return priority


def _deadline_s(header: str | None, timeout: object) -> float | None:
    if header is not None:
        return _seconds(DEADLINE, header, _number(header))
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        return _seconds("timeout", timeout, math.nan)
    return _seconds("timeout", timeout, timeout)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _seconds(name: str, given: object, seconds: float) -> float:
    if 0 < seconds < math.inf:
        return float(min(MAX_DEADLINE_S, seconds))
    raise _invalid(name, given, "a number of seconds above 0")


def _later_s(priority: object) -> float:
    if not isinstance(priority, int):  # vLLM rejects the request
        return 0.0
    return float(max(EARLIEST_S, min(LATEST_S, priority)))


def _invalid(name: str, given: object, expected: str) -> ApiError:
    return invalid(name, f"{name} is {shown(given)}; expected {expected}")
