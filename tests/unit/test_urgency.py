"""How long a request can wait is read from its headers, its body and its key."""

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.contract.priority import PRIORITIES, Priority
from kvroute.features.gate import ANYONE, Caller
from kvroute.router.api.errors import ApiError
from kvroute.router.api.urgency import DEADLINE, MAX_USER, PRIORITY, urgency_of
from kvroute.router.placement.waits import Urgency

MAX_WAIT_S = 30.0


def urgency(headers: dict[str, str] | None = None, caller: Caller = ANYONE, **body: Any) -> Urgency:
    return urgency_of(headers or {}, body, caller, max_wait_s=MAX_WAIT_S)


def key(priority: Priority) -> Caller:
    return Caller("acme", frozenset(), "salt", priority=priority)


def test_a_request_without_urgency_waits_up_to_the_operators_limit() -> None:
    assert urgency() == Urgency("default", 0.0, MAX_WAIT_S, None)
    assert urgency_of({}, {}, ANYONE, max_wait_s=0).max_wait_s == math.inf


@pytest.mark.parametrize(
    ("headers", "body", "most_s"),
    [
        ({DEADLINE: "2.5"}, {}, 2.5),
        ({}, {"timeout": 2}, 2.0),
        ({DEADLINE: "2.5"}, {"timeout": 9}, 2.5),
        ({DEADLINE: "600"}, {}, MAX_WAIT_S),  # not above the operator's limit
        ({PRIORITY: "batch"}, {}, math.inf),
        ({PRIORITY: "batch", DEADLINE: "600"}, {}, 600.0),
    ],
)
def test_a_request_can_set_its_longest_wait(
    headers: dict[str, str], body: dict[str, Any], most_s: float
) -> None:
    assert urgency(headers, **body).max_wait_s == most_s


@pytest.mark.parametrize("given", ["soon", "", "0", "-1", "nan", "inf", "1e400", "5 s"])
def test_an_invalid_deadline_is_refused(given: str) -> None:
    with pytest.raises(ApiError, match=r"x-kvroute-deadline-s is .*; expected a number of seconds"):
        urgency({DEADLINE: given})


@pytest.mark.parametrize(
    ("body", "delay_s"),
    [
        ({"nvext": {"agent_hints": {"priority": 5, "osl": 1024}}}, -5.0),
        ({"nvext": {"agent_hints": {"priority": -9000}}}, 3600.0),
        ({"nvext": {"agent_hints": {"priority": 5}}, "priority": 7}, 7.0),
        ({"nvext": {"agent_hints": {"priority": "high"}}}, 0.0),
        ({"nvext": [1]}, 0.0),
    ],
)
def test_dynamos_priority_counts_upwards(body: dict[str, Any], delay_s: float) -> None:
    assert urgency(**body).delay_s == delay_s


@pytest.mark.parametrize("given", [0, -1, True, "5", [5], {}])
def test_an_invalid_timeout_is_refused(given: Any) -> None:
    with pytest.raises(ApiError) as refused:
        urgency(timeout=given)
    assert (refused.value.status, refused.value.param) == (400, "timeout")


def test_an_unknown_priority_is_refused() -> None:
    with pytest.raises(ApiError, match="expected one of interactive, default, batch"):
        urgency({PRIORITY: "urgent"})


@pytest.mark.parametrize("own", PRIORITIES)
@pytest.mark.parametrize("header", [None, *PRIORITIES])
def test_a_request_is_never_more_urgent_than_its_key(
    own: Priority, header: Priority | None
) -> None:
    priority = urgency({PRIORITY: header} if header else {}, key(own)).priority
    expected = max(PRIORITIES.index(own), PRIORITIES.index(header or own))
    assert priority == PRIORITIES[expected]


def test_the_priority_in_a_body_is_a_delay_in_seconds() -> None:
    assert urgency(priority=5).delay_s == 5
    found = urgency({PRIORITY: "interactive"}, priority=5)
    assert (found.delay_s, found.is_interactive) == (5, True)
    assert urgency(priority=-(10**30)).delay_s == -60
    assert urgency(priority=10**30).delay_s == 3600
    assert urgency(caller=key("default"), priority=-5).delay_s == 0
    assert urgency(caller=key("default"), priority=5).delay_s == 5


@given(st.dictionaries(st.sampled_from(["timeout", "priority"]), st.integers() | st.text()))
def test_any_body_has_an_urgency_or_is_refused(body: dict[str, Any]) -> None:
    with contextlib.suppress(ApiError):
        found = urgency(**body)
        assert math.isfinite(found.delay_s)
        assert 0 < found.max_wait_s <= MAX_WAIT_S


def test_the_sharer_is_the_tenant_else_the_user() -> None:
    assert urgency(caller=key("default"), user="ann").sharer == "acme"
    assert urgency(user="ann").sharer == "ann"
    assert urgency().sharer == urgency(user=5).sharer == ""
    long = [urgency(user=letter * 10_000).sharer for letter in "ab"]
    assert long[0] != long[1]
    assert max(map(len, long)) <= MAX_USER
