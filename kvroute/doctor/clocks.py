"""Checks that clocks agree, from timestamps in the responses of the cluster's processes."""

from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime

from kvroute.doctor.checks import Check
from kvroute.process.clock_offset import AGREED_S, Offset, offset

REMEDY = "synchronise the clocks of all nodes, with chrony or another NTP client"


def dated(header: str | None, *, sent_s: float, received_s: float) -> Offset | None:
    """Return the offset of the clock that wrote an HTTP Date header, or None without a header."""
    try:
        clock_s = parsedate_to_datetime(header or "").timestamp()
    except ValueError:
        return None
    return offset(clock_s, sent_s=sent_s, received_s=received_s, resolution_s=1.0)


def judge(router: Offset, redis: Offset | None, processes: Mapping[str, Offset]) -> Iterator[Check]:
    """Check that the clocks agree.

    Args:
        router: Offset of the router's clock to this computer's.
        redis: Offset of Redis's clock to the router's; None: unknown.
        processes: Process -> offset of its clock to this computer's.
    """
    ahead_s = {
        name: clock.relative_to(router).min_difference_s for name, clock in processes.items()
    }
    if redis is not None:
        ahead_s["Redis"] = redis.min_difference_s
    wrong = {name: by_s for name, by_s in ahead_s.items() if abs(by_s) > AGREED_S}
    for name, by_s in wrong.items():
        yield Check("clocks", "wrong", f"{name} is {_ahead(by_s)} the router", REMEDY)
    if abs(router.min_difference_s) > AGREED_S:
        finding = f"the router is {_ahead(router.min_difference_s)} this computer"
        yield Check("clocks", "warning", finding, "correct the clock that is wrong")
    elif not wrong:
        others = f", and with {len(ahead_s)} others of the cluster" if ahead_s else ""
        yield Check("clocks", "ok", f"the router's clock agrees with this computer's{others}")


def _ahead(by_s: float) -> str:
    return f"{abs(by_s):.1f} s {'ahead of' if by_s > 0 else 'behind'}"
