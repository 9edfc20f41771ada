"""The HTTP route that returns the accounts of tenants."""

import asyncio
from datetime import UTC, date, datetime, timedelta

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvroute.features.keys.accounting.accounts import as_json
from kvroute.features.keys.accounting.daily_accounts import KEPT_DAYS
from kvroute.features.keys.key_gate import KeyGate
from kvroute.router.api.errors import ApiError, invalid, needing_redis, shown
from kvroute.router.serving.models import Served, label_by_model

DEFAULT_DAYS = 30  # length of the period if the query has no first day

routes = APIRouter()


@routes.get("/v1/cluster/tenants")
async def tenants(
    request: Request,
    models: Served,
    since: str | None = None,
    until: str | None = None,
    model: str | None = None,
) -> Response:
    """Return each tenant's usage in a period, in descending order of GPU seconds."""
    today = datetime.now(UTC).date()
    days = days_between(since, until, today=today, limit=KEPT_DAYS)
    selected = models.all if model is None else [models.select(model)]
    gate = request.app.state.gate
    if not isinstance(gate, KeyGate):
        raise ApiError(
            404,
            "the usage of tenants is counted only if clients need API keys; restart with "
            "kvroute serve --api-keys FILE",
        )
    with needing_redis():
        by_model = await asyncio.gather(
            *(gate.accounts[served.name].sum_of_days(days) for served in selected)
        )
    entries = ((as_json(*account) for account in accounts.items()) for accounts in by_model)
    accounts = label_by_model(selected, entries)
    accounts.sort(key=lambda account: -sum(account["gpu_seconds"].values()))
    period = {"since": days[0].isoformat(), "until": days[-1].isoformat()}
    return JSONResponse({"object": "list", **period, "data": accounts})


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
