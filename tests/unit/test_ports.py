"""free_port() never returns a port that another caller has reserved and not bound yet."""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator

import pytest

from kvroute.local import ports

ASK = "from kvroute.local import ports; ports.PORTS = range({first}, {last}); {then}"


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[range]:
    """Restrict free_port() to three ports that no other process uses."""
    monkeypatch.setattr(ports, "_claims", deque())
    firsts = range(7000, 8000, 3)
    first = next(first for first in firsts if not any(taken(first + i) for i in range(3)))
    monkeypatch.setattr(ports, "PORTS", range(first, first + 3))
    yield ports.PORTS
    for claim in ports._claims:
        os.close(claim)


def taken(port: int) -> bool:
    return ports.listen_error("", port) is not None


def test_one_process_gets_each_port_once(three: range) -> None:
    assert sorted(ports.free_port() for _ in three) == list(three)


def test_another_process_gets_another_port(three: range) -> None:
    mine = {ports.free_port(), ports.free_port()}
    others = int(elsewhere(three, "print(ports.free_port())"))
    assert mine | {others} == set(three)


def test_a_reservation_ends_with_its_process(three: range) -> None:
    elsewhere(three, "[ports.free_port() for _ in range(3)]")
    assert sorted(ports.free_port() for _ in three) == list(three)


def test_the_number_of_reservations_is_bounded(
    three: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "MAX_CLAIMS", 2)
    given = [ports.free_port() for _ in three]
    assert sorted(given) == list(three)
    assert ports.free_port() == given[0]  # the oldest reservation was released


def elsewhere(choice: range, then: str) -> str:
    code = ASK.format(first=choice[0], last=choice[-1] + 1, then=then)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    ).stdout


def test_nobody_else_can_listen_on_a_reserved_port_until_it_is_released(three: range) -> None:
    port = ports.free_port()
    with ports.reserve("127.0.0.1", port):
        assert taken(port)
        with ports.reserve("127.0.0.1", port):
            pass  # what cannot be reserved again is no error
    assert not taken(port)
