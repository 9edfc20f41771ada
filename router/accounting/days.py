"""Parses the period of a query: its first and its last day, in UTC."""

from datetime import date, timedelta

from kvroute.router.api.errors import invalid, shown

DEFAULT_DAYS = 30  # length of the period if the query has no first day


def days_between(since: str | None, until: str | None, *, today: date, limit: int) -> list[date]:
    """Return the days from `since` to `until`, both included.

    `until` defaults to today. Without `since`, the period has DEFAULT_DAYS days.

    Raises:
        ApiError: a date is not valid, or the period has no days or more than `limit` days.
    """
    last = _date("until", until) if until is not None else today
    if since is not None:
        first = _date("since", since)
    else:
        first = date.fromordinal(max(1, last.toordinal() - DEFAULT_DAYS + 1))
    count = (last - first).days + 1
    if not 0 < count <= limit:
        raise invalid(
            "since",
            f"since is {first} and until is {last}; expected 1 to {limit} days, both included",
        )
    return [first + timedelta(days=offset) for offset in range(count)]


def _date(name: str, value: str) -> date:
    """Return the date in a field of the query.

    Raises:
        ApiError: the value is not a date in ISO format.
    """
    try:
        day = date.fromisoformat(value)
    except ValueError:
        day = None
    if day is None or day.isoformat() != value:
        raise invalid(name, f"{name} is {shown(value)}; expected a date such as 2026-11-23")
    return day
