"""A clock that jumps on one machine changes nothing that the processes of a cluster share."""

from types import SimpleNamespace

import pytest

from kvroute.store import connection
from kvroute.store.connection import SharedClock

DAY_S = 86_400.0


class Machine:
    """This machine's clocks, and the clock of Redis, as the test sets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_s, self.monotonic_s, self.redis_s = 1e9, 50.0, 1e9
        clocks = SimpleNamespace(time=lambda: self.wall_s, monotonic=lambda: self.monotonic_s)
        monkeypatch.setattr(connection, "time", clocks)
        self.shared = SharedClock()
        self.pass_s(0)

    def pass_s(self, seconds: float) -> None:
        """Let time pass on all clocks, and read the clock of Redis."""
        self.wall_s += seconds
        self.monotonic_s += seconds
        self.redis_s += seconds
        self.shared.update((int(self.redis_s), 0))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("clock", ["wall_s", "redis_s"])
@pytest.mark.parametrize("jump_s", [-DAY_S, DAY_S])
def test_a_clock_that_jumps_alone_does_not_move_the_shared_time(
    machine: Machine, clock: str, jump_s: float
) -> None:
    setattr(machine, clock, getattr(machine, clock) + jump_s)
    for number in range(1, 4):
        machine.pass_s(2)
        assert machine.shared.now_s() == 1e9 + 2 * number


def test_clocks_that_move_together_move_the_shared_time(machine: Machine) -> None:
    """As after a sleep of the machine, or when Redis runs on the same machine."""
    machine.wall_s += DAY_S
    machine.redis_s += DAY_S
    machine.pass_s(2)
    assert machine.shared.now_s() == 1e9 + DAY_S + 2


def test_it_goes_on_while_redis_is_away_or_does_not_tell_its_time(machine: Machine) -> None:
    machine.monotonic_s += 60
    assert machine.shared.now_s() == 1e9 + 60
    machine.shared.update(ValueError("no permission"))
    assert machine.shared.now_s() == 1e9 + 60
