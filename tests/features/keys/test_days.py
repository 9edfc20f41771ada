"""Clients send the first and the last day; the error for an invalid date shows a valid one."""

from contextlib import suppress
from datetime import date, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.features.keys.accounting.tenant_routes import DEFAULT_DAYS, days_between
from kvroute.router.api.errors import ApiError

TODAY = date(2026, 11, 23)


def days(since: str | None = None, until: str | None = None) -> list[date]:
    return days_between(since, until, today=TODAY, limit=400)


@given(st.dates(), st.integers(1, 400))
def test_both_days_are_included(until: date, count: int) -> None:
    since = date.fromordinal(max(1, until.toordinal() - count + 1))
    period = days(since.isoformat(), until.isoformat())
    assert (period[0], period[-1]) == (since, until)
    assert {later - earlier for earlier, later in pairwise(period)} <= {timedelta(1)}


def test_the_default_is_the_last_month() -> None:
    period = days()
    assert (period[-1], len(period)) == (TODAY, DEFAULT_DAYS)
    assert days("2026-11-20")[0] == date(2026, 11, 20)
    assert len(days(until="2026-01-05")) == DEFAULT_DAYS
    assert days(until="0001-01-02")[0] == date.min


@pytest.mark.parametrize(
    "given", ["", "yesterday", "20261123", "2026-W47-1", "2026-13-01", "x" * 999]
)
def test_an_invalid_date_is_refused_with_an_example(given: str) -> None:
    for since, until in ((given, None), (None, given)):
        with pytest.raises(ApiError) as refused:
            days(since, until)
        assert refused.value.status == 400
        assert refused.value.param == ("until" if since is None else "since")
        assert "such as 2026-11-23" in refused.value.message
        assert len(refused.value.message) < 200


@pytest.mark.parametrize("since", ["2026-11-24", "2025-01-01"])
def test_a_period_without_days_or_with_too_many_is_refused(since: str) -> None:
    with pytest.raises(ApiError, match="expected 1 to 400 days"):
        days(since)


@given(st.text(max_size=12))
def test_any_text_is_a_date_or_is_refused(text: str) -> None:
    with suppress(ApiError):
        days(text)
