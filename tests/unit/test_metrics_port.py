"""A process has its metrics on a port of the range, for who knows the token, or does without."""

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter

from kvroute.local.before_start import check_metrics_token
from kvroute.local.ports import free_port, listen_error
from kvroute.machine.problem import StartError
from kvroute.process.metrics_port import (
    MAX_CLIENTS,
    Exposition,
    NoMetricsError,
    _guarded,
    expose,
    read_token,
)

LOOPBACK = "127.0.0.1"
NO_TOKENS = {
    "empty": b" \n",
    "two words": b"one two",
    "not ASCII": b"\xfc",
}


@contextmanager
def serving(**options: Any) -> Iterator[Exposition]:
    registry = CollectorRegistry()
    Counter("answers", "For the test.", registry=registry).inc(42)
    exposition = Exposition(LOOPBACK, registry, **options)
    try:
        yield exposition
    finally:
        exposition.close()


def get(exposition: Exposition, **headers: str) -> httpx.Response:
    return httpx.get(f"http://{exposition.address}/metrics", headers=headers)


def free_ports(count: int) -> range:
    """Neighbours."""
    while True:
        first = free_port()
        if all(listen_error(LOOPBACK, port) is None for port in range(first, first + count)):
            return range(first, first + count)


def test_processes_take_the_ports_of_the_range_one_by_one() -> None:
    ports = free_ports(3)
    with ExitStack() as running:
        each = [running.enter_context(serving(ports=ports)) for _ in ports]
        assert [one.address for one in each] == [f"{LOOPBACK}:{port}" for port in ports]
        assert all("answers_total 42.0" in get(one).text for one in each)


def test_ports_of_other_processes_are_skipped_and_freed_ports_are_used_again() -> None:
    ports = free_ports(2)
    with socket.create_server((LOOPBACK, ports[0])), serving(ports=ports) as exposition:
        assert exposition.address == f"{LOOPBACK}:{ports[1]}"
    with serving(ports=ports) as exposition:
        assert exposition.address == f"{LOOPBACK}:{ports[0]}"


def test_a_full_range_is_a_warning_with_the_count_and_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ports = free_ports(2)
    with serving(ports=ports), serving(ports=ports), caplog.at_level(logging.WARNING):
        assert expose(LOOPBACK, CollectorRegistry(), ports=ports, token_file=None) is None
    (line,) = caplog.messages
    assert "this process does not serve metrics: cannot listen on" in line
    assert "on any of the 2 ports of metrics_port_range" in line
    assert "set a wider range" in line


def test_an_address_that_is_not_this_computers_is_a_warning_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert expose("192.0.2.1", CollectorRegistry(), ports=(0,), token_file=None) is None
    (line,) = caplog.messages
    assert "cannot listen on 192.0.2.1" in line
    assert "set KVROUTE_METRICS_HOST" in line


def test_without_a_range_the_system_picks_a_port() -> None:
    with serving() as one, serving() as other:
        assert one.address != other.address


def test_an_address_of_version_6_is_in_brackets() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this computer has no IPv6")
    exposition = Exposition("::1", CollectorRegistry())
    try:
        assert exposition.address.startswith("[::1]:")
        assert get(exposition).status_code == 200
    finally:
        exposition.close()


def test_only_clients_with_the_token_can_read_metrics(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("se-cret\n")
    with serving(token_file=file) as exposition:
        assert "answers_total" in get(exposition, authorization="Bearer se-cret").text
        for wrong in ({}, {"authorization": "Bearer no"}, {"authorization": "se-cret"}):
            refused = get(exposition, **wrong)
            assert (refused.status_code, refused.content) == (401, b"")
            assert refused.headers["www-authenticate"] == "Bearer"


def test_silent_clients_keep_nobody_out_and_are_bounded() -> None:
    with serving() as exposition:
        host, port = exposition.address.split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(MAX_CLIENTS + 1)]
        silent[0].settimeout(20)
        assert silent[0].recv(1) == b""  # the oldest is closed
        assert "answers_total" in get(exposition).text
        for each in silent:
            each.close()


@given(st.text(st.characters(max_codepoint=255)))
def test_no_other_header_gives_access_to_metrics(header: str) -> None:
    said: list[str] = []

    def start(status: str, headers: Any) -> None:
        said.append(status)

    def application(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        return [b"metrics"]

    guarded = _guarded(application, b"se-cret")
    assert guarded({"HTTP_AUTHORIZATION": header}, start) == []
    assert said == ["401 Unauthorized"]
    assert guarded({"HTTP_AUTHORIZATION": "Bearer se-cret"}, start) == [b"metrics"]


@pytest.mark.parametrize("content", NO_TOKENS.values(), ids=NO_TOKENS)
def test_an_empty_token_file_never_gives_access_without_a_token(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    assert expose(LOOPBACK, CollectorRegistry(), ports=(0,), token_file=file) is None
    with pytest.raises(StartError, match="has no token; write one word"):
        check_metrics_token(file)


def test_the_error_for_a_missing_token_file_has_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(NoMetricsError, match=r"cannot be read .*; copy the file to every node"):
        read_token(tmp_path / "token")
    check_metrics_token(None)
