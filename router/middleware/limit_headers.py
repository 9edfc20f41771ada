"""A tenant's limits in responses: OpenAI's headers, and the error of a request over a limit."""

import math

from kvroute.router.admission.limits import MINUTE_S, Headroom, Limit, OverLimitError
from kvroute.router.api.errors import ApiError

KINDS: dict[Limit, str] = {  # limit -> what it limits, for error messages
    "requests": "running requests",
    "prompt_tokens": "prompt tokens of running requests",
    "uncached_tokens": "uncached prompt tokens per minute",
}


def rate_headers(headroom: Headroom) -> dict[str, str]:
    """Return the headers of each response to a tenant with limits."""
    headers = dict[str, str]()
    if headroom.requests is not None:
        headers |= _limit_headers(
            "requests", headroom.requests, headroom.requests_left, headroom.requests_reset_s
        )
    if headroom.tokens is not None:
        headers |= _limit_headers(
            "tokens", headroom.tokens, headroom.tokens_left, headroom.tokens_reset_s
        )
    return headers


def over_limit(error: OverLimitError, headroom: Headroom) -> ApiError:
    """Return a 429 with the limit that is exceeded, and the time until a retry."""
    headers = rate_headers(headroom)
    if math.isinf(error.wait_s):
        headers["x-should-retry"] = "false"
        remedy = f"this request alone has {error.requested}; send fewer tokens in one request"
    else:
        wait_s = max(1, math.ceil(error.wait_s))
        headers["retry-after"] = str(wait_s)
        remedy = f"try again in {wait_s} s"
    return ApiError(
        429,
        f"tenant {error.tenant} has reached its limit of {error.maximum} {KINDS[error.limit]}"
        f"{_shared(error)}{_counted(error)}; {remedy}",
        code="rate_limit_exceeded",
        headers=headers,
    )


def duration(seconds: float) -> str:
    """Return a duration in OpenAI's format: 120ms, 1s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms" if seconds > 0 else "0s"
    minutes, rest = divmod(math.ceil(seconds), int(MINUTE_S))
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _limit_headers(name: str, limit: int, left: int, reset_s: float) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(limit),
        f"x-ratelimit-remaining-{name}": str(left),
        f"x-ratelimit-reset-{name}": duration(reset_s),
    }


def _shared(error: OverLimitError) -> str:
    if error.shared_by == 1:
        return ""
    return (
        f" (Redis cannot be reached, so each of {error.shared_by} routers admits its share of the "
        "limit)"
    )


def _counted(error: OverLimitError) -> str:
    if error.limit != "uncached_tokens":
        return ""
    return (
        f". This request has {error.requested} of them. Tokens that a replica has cached do not "
        "count"
    )
