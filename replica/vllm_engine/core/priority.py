"""Converts a request's `order_s` to vLLM's priority.

The router sets `order_s`, a number of seconds. Requests run in the order of their time of arrival
plus `order_s`.
"""

import time

from kvroute.contract.generation import GenerateRequest

# Priority units per second. vLLM's priorities are integers. With this short unit, requests that
# arrive one after the other have different priorities.
UNITS_PER_S = 1_000_000


def priority_of(request: GenerateRequest) -> int:
    """Return vLLM's priority of a request that arrives now. vLLM runs the smallest one first."""
    return round((time.monotonic() + request.order_s) * UNITS_PER_S)
