"""Checks how many requests wait for a seat of their session.

While the contexts of the active sessions do not fit in the caches, only sessions with a seat may
send requests.
"""

from collections.abc import Iterable, Iterator

from kvroute.doctor.checks import Check, Facts
from kvroute.wording import plural

MORE_CACHE = (
    "add replicas, or host memory for caches (--host-cache-gb); with --max-sessions off no request "
    "waits for a seat, but sessions evict each other's blocks, which are then computed again"
)
MORE_SEATS = (
    "raise --max-sessions; with --max-sessions auto sessions wait only while their contexts do not "
    "fit in the caches"
)


def seats(models: Iterable[Facts]) -> Iterator[Check]:
    """Check whether requests wait for a seat.

    Args:
        models: One router's view of each model's seats.
    """
    for model in models:
        is_waiting = model["is_limited"] and model["all_routers"]["waiting"]
        if is_waiting:
            remedy = MORE_CACHE if model["most"] is None else MORE_SEATS
            yield Check("seats", "warning", seated(model), remedy)
        else:
            yield Check("seats", "ok", _without_waits(model))


def seated(seats: Facts) -> str:
    """Return a text: how many sessions have seats, why not all, and how many requests wait."""
    waiting = seats["all_routers"]["waiting"]
    text = f"{seats['seats']:,} of {plural(seats['sessions'], 'session')} for {seats['model']} "
    text += f"with a seat, since {_why(seats)}; {plural(waiting, 'request')} waiting for a seat"
    if waiting:
        text += f", the oldest for {seats['all_routers']['oldest_s']:.0f} s"
    return text


def _without_waits(seats: Facts) -> str:
    if seats["is_limited"]:
        return seated(seats)
    return f"{seats['model']} had {_recent_sessions(seats)}; none needs a seat"


def status_line(seats: Facts) -> str:
    """Return the same for `kvroute status`, where the model's name is known."""
    return seated(seats) if seats["is_limited"] else f"no limit; {_recent_sessions(seats)}"


def _recent_sessions(seats: Facts) -> str:
    """Return how many sessions were active lately; a single request is a session, too."""
    return (
        f"{plural(seats['sessions'], 'conversation')} (single requests included) in the last minute"
    )


def _why(seats: Facts) -> str:
    if seats["most"] is not None:
        return f"--max-sessions is {seats['most']:,}"
    return (
        f"the contexts of active sessions have {seats['tokens']:,} tokens, and the caches hold "
        f"{seats['limit_tokens']:,}"
    )
