"""A tenant's limits in responses: OpenAI's headers, and the error of a request over a limit."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from kvroute.features.keys import OVER_LIMIT
from kvroute.router.api.errors import ApiError

Limit = Literal["requests", "prompt_tokens", "uncached_tokens"]
KINDS: dict[Limit, str] = {  # limit -> what it limits, for error messages
    "requests": "running requests",
    "prompt_tokens": "prompt tokens of running requests",
    "uncached_tokens": "uncached prompt tokens per minute",
}


class Left(NamedTuple):
    """What is left of one of a tenant's limits."""

    limit: int
    left: int
    reset_s: float  # estimated seconds until nothing of the limit is used


# By "requests" and "tokens". The latter are uncached tokens per minute, or else prompt tokens in
# flight. What has no limit is missing.
Headroom = Mapping[str, Left]


class OverLimitError(ApiError):
    """A 429: a request would exceed a limit of its tenant. It says when to try again."""

    def __init__(
        self,
        tenant: str,
        limit: Limit,
        maximum: int,
        requested: int,
        wait_s: float,
        *,
        shared_by: int,
        headroom: Headroom,
    ) -> None:
        """Create the error.

        Args:
            limit: the limit that is exceeded.
            maximum: value of the limit in the key file.
            requested: amount that the request would add.
            wait_s: seconds until the request may be admitted; inf: it alone exceeds the limit.
            shared_by: number of routers that are cut off from each other, and enforce an equal part
                of `maximum`. 1: they are connected.
        """
        self.tenant, self.limit, self.maximum = tenant, limit, maximum
        self.requested, self.wait_s, self.shared_by = requested, wait_s, shared_by
        headers = rate_headers(headroom)
        if math.isinf(wait_s):
            headers["x-should-retry"] = "false"
            remedy = f"this request alone has {requested}; send fewer tokens in one request"
        else:
            headers["retry-after"] = str(max(1, math.ceil(wait_s)))
            remedy = f"try again in {headers['retry-after']} s"
        shared = counted = ""
        if shared_by > 1:
            shared = (
                f" (Redis cannot be reached, so each of {shared_by} routers admits its share of "
                "the limit)"
            )
        if limit == "uncached_tokens":
            counted = (
                f". This request has {requested} of them. Tokens that a replica has cached do not "
                "count"
            )
        super().__init__(
            429,
            f"tenant {tenant} has reached its limit of {maximum} {KINDS[limit]}{shared}{counted}; "
            f"{remedy}",
            code=OVER_LIMIT,
            headers=headers,
        )


def rate_headers(headroom: Headroom) -> dict[str, str]:
    """Return the headers of each response to a tenant with limits."""
    headers = dict[str, str]()
    for name, (limit, left, reset_s) in headroom.items():
        headers[f"x-ratelimit-limit-{name}"] = str(limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(left)
        headers[f"x-ratelimit-reset-{name}"] = duration(reset_s)
    return headers


def duration(seconds: float) -> str:
    """Return a duration in OpenAI's format: 120ms, 1s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms" if seconds > 0 else "0s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
