"""The days that a client asks about, in UTC."""

from datetime import date, timedelta

from kvroute.router.api.errors import invalid, shown

USUAL_DAYS = 30  # of which the client gets the sum unless it says since when


def days_between(since: str | None, until: str | None, *, today: date, most: int) -> list[date]:
    """From the one to the other, both included. ApiError for what is no date, and for none or more
    than `most` days.

    until: today without it. since: USUAL_DAYS before without it.
    """
    last = _date("until", until) if until is not None else today
    if since is not None:
        first = _date("since", since)
    else:
        first = date.fromordinal(max(1, last.toordinal() - USUAL_DAYS + 1))
    count = (last - first).days + 1
    if not 0 < count <= most:
        raise invalid(
            "since",
            f"since is {first} and until is {last}; expected 1 to {most} days, both included",
        )
    return [first + timedelta(days=number) for number in range(count)]


def _date(name: str, given: str) -> date:
    try:
        found = date.fromisoformat(given)
    except ValueError:
        found = None
    if found is None or found.isoformat() != given:
        raise invalid(name, f"{name} is {shown(given)}; expected a date such as 2026-11-23")
    return found
