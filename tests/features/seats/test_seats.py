"""Sessions whose contexts do not fit in the caches together have to wait for seats."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.features.seats.seats import CACHE_SHARE, IDLE_S, PATIENCE_S, WaitingSessions
from tests.features.seats.seated_sessions import CAPACITY, MANY, Sessions

LIMIT = int(CACHE_SHARE * CAPACITY)
SESSIONS = 8  # sessions in a generated sequence of steps


@pytest.fixture
def full() -> Sessions:
    """Return six sessions, of which two have seats and fill the cache."""
    sessions = Sessions()
    for session in range(1, 7):
        sessions.begin(session, 300)
    sessions.thrash()
    assert [sessions.ask(session, 400) for session in (1, 2)] == [True, True]
    return sessions


def test_no_request_waits_while_the_contexts_fit() -> None:
    sessions = Sessions()
    sessions.thrash()
    for session in range(1, 4):
        sessions.begin(session, LIMIT // 3)
    assert all(sessions.ask(session, LIMIT // 3) for session in range(1, 4))
    assert not sessions.seats.state(0.0).is_limited


@pytest.mark.parametrize(("is_busy", "pressure"), [(False, 3.0), (True, 0.5)])
def test_no_request_waits_while_replicas_are_idle_or_little_is_evicted(
    is_busy: bool, pressure: float
) -> None:
    sessions = Sessions()
    for _ in range(MANY):
        sessions.seats.observe(is_busy=is_busy, pressure=pressure)
    for session in range(1, 20):
        sessions.begin(session, 300)
        assert sessions.ask(session, 300)


def test_sessions_that_do_not_fit_get_seats_in_the_order_of_arrival(
    full: Sessions,
) -> None:
    assert not any(full.ask(session, 400) for session in (3, 4, 5))
    assert full.seated() == []
    assert full.ask(1, 450), "a session with a seat can send"
    full.seats.session_ended(1)
    assert full.seated() == [3]
    full.seats.session_ended(2)
    assert full.seated() == [4]


def test_a_first_prompt_needs_no_seat(full: Sessions) -> None:
    full.begin(99, 400)
    assert full.seats.state(full.now_s).seats == 2


def test_all_requests_of_a_session_share_its_seat(full: Sessions) -> None:
    assert not full.ask(3, 400)
    assert not full.ask(4, 400)
    assert not full.ask(3, 410)
    full.seats.session_ended(1)
    assert full.seated() == [3, 3]


def test_a_session_loses_its_seat_when_idle_but_not_while_a_request_runs(
    full: Sessions,
) -> None:
    full.end(1)
    assert not full.ask(3, 400)
    assert not full.ask(4, 400)
    full.now_s = IDLE_S - 1
    assert full.seated() == []
    full.now_s = IDLE_S
    assert full.seated() == [3]
    full.now_s = 3 * IDLE_S
    assert full.seated() == [], "requests of 2 and 3 are running"


def test_the_tenant_with_the_fewest_seats_is_next(full: Sessions) -> None:
    assert not full.ask(3, 400, tenant=0)
    full.now_s += 1
    assert not full.ask(4, 400, tenant=7)
    full.seats.session_ended(1)
    assert full.seated() == [4]


def test_a_removed_request_no_longer_waits(full: Sessions) -> None:
    waiter = full.waiter(3, 400)
    assert not full.seats.can_send(waiter, full.now_s)
    full.seats.add(waiter)
    assert full.seats.remove(waiter)
    assert not full.seats.remove(waiter)
    full.seats.session_ended(1)
    assert full.seated() == []


def test_a_session_that_exceeds_the_cache_gets_a_seat_when_no_other_has_one(full: Sessions) -> None:
    assert not full.ask(3, 2 * CAPACITY)
    full.seats.session_ended(1)
    assert full.seated() == []
    full.seats.session_ended(2)
    assert full.seated() == [3]
    assert not full.ask(4, 10)


def test_a_fixed_number_of_seats_applies_whatever_fits() -> None:
    sessions = Sessions(most=2)
    for session in (1, 2, 3):
        sessions.begin(session, 10)
    assert [sessions.ask(session, 20) for session in (1, 2, 3)] == [True, True, False]
    sessions.seats.session_ended(2)
    assert sessions.seated() == [3]


def test_waiting_requests_are_sent_when_the_limit_ends(full: Sessions) -> None:
    assert not full.ask(3, 400)
    for session in (1, 2, 4, 5, 6):
        full.seats.session_ended(session)
    assert full.seated() == [3]
    assert not full.seats.state(full.now_s).is_limited


def test_the_request_that_arrived_first_on_any_router_gets_the_first_seat() -> None:
    sessions = Sessions(most=1, routers=2)
    for session in (1, 2, 3):
        sessions.begin(session, 10)
    assert sessions.ask(1, 20)
    assert not sessions.ask(2, 20, router=1)
    sessions.now_s += 1
    assert not sessions.ask(3, 20, router=0)
    for seats in sessions.routers:
        seats.session_ended(1)
    assert sessions.seated(router=0) == []
    assert sessions.seated(router=1) == [2]
    assert sessions.seated(router=0) == []
    for seats in sessions.routers:
        seats.session_ended(2)
    assert sessions.seated(router=0) == [3]


def test_a_silent_router_delays_others_only_for_a_short_time() -> None:
    sessions = Sessions(most=1)
    for session in (1, 2):
        sessions.begin(session, 10)
    assert sessions.ask(1, 20)
    sessions.seats.receive("silent", WaitingSessions(1, 10.0), sessions.now_s)
    assert not sessions.ask(2, 20)
    sessions.seats.session_ended(1)
    assert sessions.seated() == []
    sessions.now_s += PATIENCE_S
    assert sessions.seated() == [2]


def test_the_forecast_is_the_interval_between_seats_times_the_position(
    full: Sessions,
) -> None:
    newcomer = full.waiter(6, 400)
    assert full.seats.forecast_s(newcomer) == 0.0, "nobody has waited yet"
    assert not full.ask(3, 400)
    full.now_s += 30
    full.seats.session_ended(1)
    assert full.seated() == [3]
    assert full.seats.forecast_s(newcomer) == 30.0
    assert not any(full.ask(session, 400) for session in (4, 5))
    assert full.seats.forecast_s(newcomer) == 90.0


def test_time_without_waiting_requests_does_not_change_the_forecast() -> None:
    sessions = Sessions(most=1)
    for session in (1, 2, 3):
        sessions.begin(session, 10)
    assert sessions.ask(1, 20)
    for session in (2, 3):
        sessions.now_s += 3000
        assert not sessions.ask(session, 20)
        sessions.now_s += 30
        sessions.seats.session_ended(session - 1)
        assert sessions.seated() == [session]
    assert sessions.seats.forecast_s(sessions.waiter(4, 20)) == 30.0


@st.composite
def steps(draw: st.DrawFn) -> list[Callable[[Sessions], None]]:
    session = st.integers(1, SESSIONS)
    ask = st.builds(_ask, session, st.integers(1, 900), st.integers(0, 2))
    end = st.builds(_end, st.integers(0, 20))
    over = st.builds(_over, session)
    wait = st.builds(_wait, st.floats(0, 2 * IDLE_S))
    return draw(st.lists(st.one_of(ask, ask, end, over, wait), max_size=60))


def _ask(session: int, tokens: int, tenant: int) -> Callable[[Sessions], None]:
    def step(sessions: Sessions) -> None:
        before, waiter = sessions.seats.state(0.0), sessions.waiter(session, tokens, tenant)
        if sessions.seats.can_send(waiter, sessions.now_s):
            check_granted(sessions, before.seats)
            sessions.send(waiter)
        else:
            assert sessions.seats.state(0.0).is_limited, (
                "a request waits although there is no limit"
            )
            sessions.seats.add(waiter)

    return step


def _end(place: int) -> Callable[[Sessions], None]:
    def step(sessions: Sessions) -> None:
        if sessions.running:
            sessions.end(sessions.running[place % len(sessions.running)])

    return step


def _over(session: int) -> Callable[[Sessions], None]:
    return lambda sessions: sessions.seats.session_ended(session)


def _wait(s: float) -> Callable[[Sessions], None]:
    def step(sessions: Sessions) -> None:
        sessions.now_s += s

    return step


def check_granted(sessions: Sessions, seats_before: int) -> None:
    """Check that a new seat fits, unless its session is the only one with a seat."""
    state = sessions.seats.state(sessions.now_s)
    if state.is_limited and state.seats > max(1, seats_before):
        assert state.seat_tokens <= state.limit_tokens


@given(steps())
def test_seats_never_exceed_the_cache_and_no_request_waits_needlessly(
    taken: list[Callable[[Sessions], None]],
) -> None:
    sessions = Sessions()
    sessions.thrash()
    for step in taken:
        step(sessions)
        while True:
            before = sessions.seats.state(0.0).seats
            waiter = sessions.seats.due(sessions.now_s)
            if waiter is None:
                break
            check_granted(sessions, before)
            sessions.send(waiter)
        state = sessions.seats.state(sessions.now_s)
        assert state.is_limited or not state.waiting
        assert state.seats or not state.waiting, "requests wait although no session has a seat"
        assert state.seat_tokens <= state.tokens
        assert 0 <= state.seats <= state.sessions
    sessions.now_s += 2 * IDLE_S
    for session in [*sessions.running]:
        sessions.end(session)
    for _ in range(SESSIONS):  # sessions that get seats now lose them again without using them
        sessions.now_s += 2 * IDLE_S
        while sessions.seats.due(sessions.now_s):
            pass
    assert sessions.seats.state(sessions.now_s).waiting == 0


def test_the_number_of_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound also applies in a router that only receives reports of other routers."""
    sessions = Sessions()
    sessions.begin(1, 10)
    sessions.now_s += IDLE_S
    sessions.send(sessions.waiter(2, 10))
    assert sessions.seats.state(sessions.now_s).sessions == 1
    monkeypatch.setattr("kvroute.features.seats.seats.MAX_SESSIONS", 5)
    for session in range(3, 20):
        sessions.send(sessions.waiter(session, 10))
    assert sessions.seats.state(sessions.now_s).sessions <= 6
