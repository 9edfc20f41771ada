"""Clients name the days that they ask about, and a wrong name is refused with what is right."""

from contextlib import suppress
from datetime import date, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.router.api.errors import ApiError
from kvroute.router.endpoints.days import USUAL_DAYS, days_between

TODAY = date(2026, 11, 23)


def asked(since: str | None = None, until: str | None = None) -> list[date]:
    return days_between(since, until, today=TODAY, most=400)


@given(st.dates(), st.integers(1, 400))
def test_both_days_are_included(until: date, count: int) -> None:
    since = date.fromordinal(max(1, until.toordinal() - count + 1))
    found = asked(since.isoformat(), until.isoformat())
    assert (found[0], found[-1]) == (since, until)
    assert {later - earlier for earlier, later in pairwise(found)} <= {timedelta(1)}


def test_without_dates_it_is_the_last_month() -> None:
    found = asked()
    assert (found[-1], len(found)) == (TODAY, USUAL_DAYS)
    assert asked("2026-11-20")[0] == date(2026, 11, 20)
    assert len(asked(until="2026-01-05")) == USUAL_DAYS
    assert asked(until="0001-01-02")[0] == date.min


@pytest.mark.parametrize(
    "given", ["", "yesterday", "20261123", "2026-W47-1", "2026-13-01", "x" * 999]
)
def test_what_is_no_date_is_refused_with_an_example(given: str) -> None:
    for since, until in ((given, None), (None, given)):
        with pytest.raises(ApiError) as refused:
            asked(since, until)
        assert refused.value.status == 400
        assert refused.value.param == ("until" if since is None else "since")
        assert "such as 2026-11-23" in refused.value.message
        assert len(refused.value.message) < 200


@pytest.mark.parametrize("since", ["2026-11-24", "2025-01-01"])
def test_too_many_days_and_none_are_refused(since: str) -> None:
    with pytest.raises(ApiError, match="expected 1 to 400 days"):
        asked(since)


@given(st.text(max_size=12))
def test_no_text_breaks_it(text: str) -> None:
    with suppress(ApiError):
        asked(text)
