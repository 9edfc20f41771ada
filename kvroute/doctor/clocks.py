"""Clock differences are bounded with the timestamps in responses of each process."""

from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from kvroute.doctor.checks import Check

AGREED_S = 1.0
REMEDY = "keep the clocks of all nodes in step: chrony, or another NTP client"


class Offset(NamedTuple):
    """Bounds of how far one clock is ahead of another, in seconds."""

    low_s: float
    high_s: float

    @property
    def least_s(self) -> float:
        """The smallest possible difference; negative: the clock is behind."""
        return max(self.low_s, 0.0) + min(self.high_s, 0.0)

    def beyond(self, other: "Offset") -> "Offset":
        """The offset of this clock to the other one; both are relative to the same third clock."""
        return Offset(self.low_s - other.high_s, self.high_s - other.low_s)


def offset(
    clock_s: float, *, sent_s: float, received_s: float, resolution_s: float = 0.0
) -> Offset:
    """The offset of a clock that was read, rounded down, between a request and its response."""
    return Offset(clock_s - received_s, clock_s + resolution_s - sent_s)


def dated(header: str | None, *, sent_s: float, received_s: float) -> Offset | None:
    """The offset of the clock that wrote an HTTP Date header; None without a readable header."""
    try:
        clock_s = parsedate_to_datetime(header or "").timestamp()
    except ValueError:
        return None
    return offset(clock_s, sent_s=sent_s, received_s=received_s, resolution_s=1.0)


def judge(router: Offset, redis: Offset | None, processes: Mapping[str, Offset]) -> Iterator[Check]:
    """router and processes: offsets to this computer's clock. redis: offset to the router's."""
    ahead_s = {name: each.beyond(router).least_s for name, each in processes.items()}
    if redis is not None:
        ahead_s["Redis"] = redis.least_s
    apart = {name: by_s for name, by_s in ahead_s.items() if abs(by_s) > AGREED_S}
    for name, by_s in apart.items():
        yield Check("clocks", "wrong", f"{name} is {_away(by_s)} the router", REMEDY)
    if abs(router.least_s) > AGREED_S:
        finding = f"the router is {_away(router.least_s)} this computer"
        yield Check("clocks", "warning", finding, "see whose clock is wrong")
    elif not apart:
        others = f", and {len(ahead_s)} of the cluster with both" if ahead_s else ""
        yield Check("clocks", "ok", f"the router's agrees with this computer's{others}")


def _away(by_s: float) -> str:
    return f"{abs(by_s):.1f} s {'ahead of' if by_s > 0 else 'behind'}"
