"""The error for a session that does not get a seat in time."""

import math

from kvroute.features.seats import NO_SEAT
from kvroute.router.api.errors import ApiError
from kvroute.router.queueing.refusals import retry_s


def no_seat(
    problem: str, wait_s: float | None, then_s: float, option_s: float, deadline_s: float
) -> ApiError:
    """Return a 429 for a session that does not get a seat in time.

    A seat is the permission of a session to send requests.

    Args:
        problem: continues the message after "this request", such as "would wait".
        wait_s: the predicted wait, or the wait so far; None: unknown.
        then_s: the predicted wait of a request that arrives now.
        option_s: the longest wait that --max-seat-wait-s allows.
        deadline_s: the longest wait that the request allows.
    """
    max_wait_s = min(option_s, deadline_s)
    again_s = retry_s(then_s - max_wait_s if max_wait_s < math.inf else 0.0)
    name = "its deadline" if deadline_s < option_s else "--max-seat-wait-s"
    duration = "" if wait_s is None else f" {wait_s:.3g} s"
    limit = "" if max_wait_s == math.inf else f", and {name} is {max_wait_s:g} s"
    return ApiError(
        429,
        f"this request {problem}{duration} for a seat of its session{limit}: more sessions are "
        f"active than --max-sessions allows at once; try again in {again_s} s, or add replicas",
        code=NO_SEAT,
        headers={"retry-after": str(again_s)},
    )
