"""The errors of requests that wait too long."""

import math

from kvroute.router.admission.waits import Urgency
from kvroute.router.api.errors import ApiError

MAX_RETRY_S = 3600.0  # the longest `retry-after` that a client gets, in seconds


def no_replica() -> ApiError:
    """Return the error for a request that comes while no replica runs."""
    return ApiError(503, "no replica is ready; try again", type="server_error")


def queue_full() -> ApiError:
    """Return the error for a request that comes while too many others wait."""
    return ApiError(429, "too many requests are waiting; try again later", code="overloaded")


def too_long(urgency: Urgency, problem: str, forecast_s: float) -> ApiError:
    """Return a 429 for a request that waits too long for a replica.

    Its `retry-after` is the time after which the wait should be below the request's limit.

    Args:
        problem: continues "this request", such as "has waited 3 s".
        forecast_s: the predicted wait of a request that comes now.
    """
    wait_s = _retry_s(forecast_s - urgency.max_wait_s)
    whose = "--max-wait-s" if urgency.requested_wait_s is None else "its deadline"
    return ApiError(
        429,
        f"this request {problem} until a replica starts it, and {whose} is "
        f"{urgency.max_wait_s:g} s; try again in {wait_s} s, or add replicas",
        type="rate_limit_error",
        code="wait_too_long",
        headers={"retry-after": str(wait_s)},
    )


def no_seat(
    problem: str, wait_s: float | None, then_s: float, option_s: float, deadline_s: float
) -> ApiError:
    """Return a 429 for a session that does not get a seat in time.

    Args:
        problem: continues "this request", such as "would wait".
        wait_s: the predicted wait, or the wait so far; None: unknown.
        then_s: the predicted wait of a request that comes now.
        option_s: the longest wait that the operator allows.
        deadline_s: the longest wait that the request allows.
    """
    most_s = min(option_s, deadline_s)
    again_s = _retry_s(then_s - most_s if most_s < math.inf else 0.0)
    whose = "its deadline" if deadline_s < option_s else "--max-seat-wait-s"
    how_long = "" if wait_s is None else f" {wait_s:.3g} s"
    limit = "" if most_s == math.inf else f", and {whose} is {most_s:g} s"
    return ApiError(
        429,
        f"this request {problem}{how_long} for a seat of its session{limit}: more sessions are "
        f"active than --max-sessions allows at once; try again in {again_s} s, or add replicas",
        type="rate_limit_error",
        code="no_seat",
        headers={"retry-after": str(again_s)},
    )


def _retry_s(late_s: float) -> int:
    return max(1, math.ceil(min(MAX_RETRY_S, late_s)))
