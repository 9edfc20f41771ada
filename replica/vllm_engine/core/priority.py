"""Converts the order of a request, which its router has set, to vLLM's priority."""

import time

from kvroute.contract.generation import GenerateRequest

# Priority units per second. A unit is short, so that requests of equal order keep the order of
# arrival.
UNITS_PER_S = 1_000_000


def priority_of(request: GenerateRequest) -> int:
    """Return vLLM's priority of a request that arrives now. vLLM runs the smallest one first."""
    return round((time.monotonic() + request.order_s) * UNITS_PER_S)
