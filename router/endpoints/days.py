"""Parses the first and the last day of a client's query, in UTC."""

from datetime import date, timedelta

from kvroute.router.api.errors import invalid, shown

DEFAULT_DAYS = 30  # number of days if the client does not send the first day


def days_between(since: str | None, until: str | None, *, today: date, most: int) -> list[date]:
    """Return the days from `since` to `until`, both included.

    `until` defaults to today. Without `since`, the period has DEFAULT_DAYS days.

    Raises:
        ApiError: a date is not valid, or the period has no day or more than `most` days.
    """
    last = _date("until", until) if until is not None else today
    if since is not None:
        first = _date("since", since)
    else:
        first = date.fromordinal(max(1, last.toordinal() - DEFAULT_DAYS + 1))
    count = (last - first).days + 1
    if not 0 < count <= most:
        raise invalid(
            "since",
            f"since is {first} and until is {last}; expected 1 to {most} days, both included",
        )
    return [first + timedelta(days=number) for number in range(count)]


def _date(name: str, given: str) -> date:
    try:
        day = date.fromisoformat(given)
    except ValueError:
        day = None
    if day is None or day.isoformat() != given:
        raise invalid(name, f"{name} is {shown(given)}; expected a date such as 2026-11-23")
    return day
