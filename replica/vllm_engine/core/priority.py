"""Converts the order that routers gave to requests to vLLM's priorities."""

import time

from kvroute.contract.generation import GenerateRequest

UNITS_PER_S = 1_000_000  # priority units per second: small enough to keep the order of arrival


def priority_of(request: GenerateRequest) -> int:
    """Return vLLM's priority of a request that arrives now; vLLM runs the smallest first."""
    return round((time.monotonic() + request.order_s) * UNITS_PER_S)
