"""vLLM runs requests in the routers' order, by this process's clock."""

import time

from kvroute.contract.generation import GenerateRequest

UNITS_PER_S = 1_000_000  # fine enough that equal orders are first come, first served


def priority_of(request: GenerateRequest) -> int:
    """vLLM's priority of a request that arrives now; the smallest is first."""
    return round((time.monotonic() + request.order_s) * UNITS_PER_S)
