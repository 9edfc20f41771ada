"""Converts a request's `order_s` and class to vLLM's priority, an integer.

The router sets `order_s`, a number of seconds. Requests run in the order of their time of arrival
plus `order_s`. The lowest bit of the priority marks batch requests, which core/lane.py limits.
"""

import time

from kvroute.contract.generation import GenerateRequest

# Priority units per second. vLLM's priorities are integers. With this short unit, requests that
# arrive one after the other have different priorities.
UNITS_PER_S = 1_000_000


def priority_of(request: GenerateRequest) -> int:
    """Return vLLM's priority of a request that arrives now. vLLM runs the smallest one first."""
    return 2 * round((time.monotonic() + request.order_s) * UNITS_PER_S) + request.is_batch


def is_in_lane(priority: int, now_s: float) -> bool:
    """Return whether a request is a batch request that still has to give way to others.

    Args:
        priority: vLLM's priority of the request.
        now_s: the current time on the monotonic clock, which all processes of a host share.
    """
    return bool(priority & 1) and priority > 2 * UNITS_PER_S * now_s
