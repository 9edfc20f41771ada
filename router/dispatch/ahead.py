"""What it is worth to compute a prompt before it is asked for: no clocks, no sockets.

    gain = share * own - pressure * (own + copy) - decode

in seconds. Own, copy and decode are those of placement/policy.py, on the replica that the prompt
would go to. Share is how many of such prompts come back, and pressure what each block pushes out
that is asked for again. So nothing is gained where caches are so tight that others are missed as
much.
"""

from bisect import bisect_right
from collections.abc import Callable

from kvroute.router.placement.attempts import Placement
from kvroute.router.placement.policy import prices, terms_s

LEAST_S = 0.01  # of prefill; for less, no request is sent
SLICE_S = 0.25  # the longest that a client may have to wait for a request without a client


def gain_s(placement: Placement, share: float) -> float:
    """Of computing the prompt where it is ranked first. share: 0 to 1."""
    best = placement.ranking[0]
    common = prices(placement.ranking, busy_s=placement.busy_s, pressure=placement.pressure)
    terms = terms_s(best, common)
    pushed_out_s = placement.pressure * (best.own_s + best.copy_s)
    return share * best.own_s - pushed_out_s - terms.decode


def slice_end(begin: int, end: int, prefill_s: Callable[[int], float]) -> int:
    """Where a slice of the blocks [begin, end) ends that takes SLICE_S at most, or is one block.

    prefill_s: of the blocks from begin to this one.
    """
    ends = range(begin + 1, end + 1)
    return ends[max(0, bisect_right(ends, SLICE_S, key=prefill_s) - 1)]
