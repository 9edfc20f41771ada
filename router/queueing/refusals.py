"""Errors for requests that the queue refuses."""

import math

from kvroute.router.api.errors import ApiError
from kvroute.router.placement.waits import Urgency

MAX_RETRY_S = 3600.0  # the longest `retry-after` that a client gets, in seconds


def no_replica() -> ApiError:
    """Return the error for a request that arrives while no replica runs."""
    return ApiError(503, "no replica is ready; try again")


def queue_full() -> ApiError:
    """Return the error for a request that arrives while too many others wait."""
    return ApiError(429, "too many requests are waiting; try again later", code="overloaded")


def too_long(urgency: Urgency, problem: str, forecast_s: float) -> ApiError:
    """Return a 429 for a request that waits too long for a replica.

    Its `retry-after` is the time after which the wait should be below the request's limit.

    Args:
        problem: continues the message after "this request", such as "has waited 3 s".
        forecast_s: the predicted wait of a request that arrives now.
    """
    again_s = retry_s(forecast_s - urgency.max_wait_s)
    limit = "--max-wait-s" if urgency.requested_wait_s is None else "its deadline"
    return ApiError(
        429,
        f"this request {problem} until a replica starts it, and {limit} is "
        f"{urgency.max_wait_s:g} s; try again in {again_s} s, or add replicas",
        code="wait_too_long",
        headers={"retry-after": str(again_s)},
    )


def retry_s(late_s: float) -> int:
    """Return the value of `retry-after` for a wait that is too long by `late_s`."""
    return max(1, math.ceil(min(MAX_RETRY_S, late_s)))
