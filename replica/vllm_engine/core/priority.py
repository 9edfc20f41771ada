"""Converts the order of a request, which its router has set, to vLLM's priority."""

import time

from kvroute.contract.generation import GenerateRequest

UNITS_PER_S = 1_000_000  # priority units per second; one microsecond sets two arrivals apart


def priority_of(request: GenerateRequest) -> int:
    """Return vLLM's priority of a request that arrives now. vLLM runs the smallest one first."""
    return round((time.monotonic() + request.order_s) * UNITS_PER_S)
