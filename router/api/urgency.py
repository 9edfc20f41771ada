"""Reads a request's priority and wait limit from its headers, body and caller."""

import math
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from kvroute.contract.priority import PRIORITIES, Priority, less_urgent, parse_priority
from kvroute.features.gate import Caller
from kvroute.router.api.errors import ApiError, invalid, shown
from kvroute.router.api.sessions import dynamos
from kvroute.router.placement.waits import Urgency

PRIORITY = "x-kvroute-priority"  # header with one of PRIORITIES
DEADLINE = "x-kvroute-deadline-s"  # header with the seconds until a replica must start the request
HEADERS = (PRIORITY, DEADLINE)  # all headers that `urgency_of` reads
MIN_DELAY_S, MAX_DELAY_S = -60.0, 3600.0  # range of the `priority` in a body, in seconds
MAX_DEADLINE_S = 1e6  # longest deadline in seconds; longer ones are reduced to it
MAX_USER = 64  # longest name of a user, in characters; longer names are hashed


def urgency_of(
    headers: Mapping[str, str], body: Mapping[str, Any], caller: Caller, *, max_wait_s: float
) -> Urgency:
    """Return the request's urgency, which is at most the priority class of its caller.

    Args:
        max_wait_s: the value of --max-wait-s; 0 means no limit.

    Raises:
        ApiError: the priority or the deadline is not valid.
    """
    requested = _priority(headers.get(PRIORITY))
    requested_wait_s = _deadline_s(headers.get(DEADLINE), body.get("timeout"))
    delay_s = _delay_s(body)
    if caller.tenant:
        requested = less_urgent(caller.priority, requested or caller.priority)
        delay_s = max(0.0, delay_s)
    priority = requested or "default"
    limit_s = math.inf if priority == "batch" or not max_wait_s else max_wait_s
    deadline_s = requested_wait_s or math.inf
    if requested_wait_s is not None and requested_wait_s >= limit_s:
        requested_wait_s = None  # the limit of --max-wait-s is shorter
    return Urgency(
        *(priority, delay_s, requested_wait_s or limit_s, requested_wait_s, deadline_s),
        sharer=_sharer(caller, body.get("user")),
    )


def _sharer(caller: Caller, user: object) -> str:
    """Return who gets a fair share of the queue: the tenant, or else the `user` in the body.

    Returns:
        "" if the request has no tenant and no user.
    """
    if caller.tenant:
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


def _delay_s(body: Mapping[str, Any]) -> float:
    """Return the seconds of vLLM's `priority`, or else those of Dynamo's, which counts upwards."""
    priority, dynamos_priority = body.get("priority"), dynamos(body, "agent_hints").get("priority")
    if priority is None and isinstance(dynamos_priority, int):
        priority = -dynamos_priority
    if not isinstance(priority, int):  # absent, or invalid: then the replica rejects the request
        return 0.0
    return float(max(MIN_DELAY_S, min(MAX_DELAY_S, priority)))


def _invalid(name: str, given: object, expected: str) -> ApiError:
    return invalid(name, f"{name} is {shown(given)}; expected {expected}")
