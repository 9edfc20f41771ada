"""Connections that do nothing shut nobody out, and end."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.support.serving import COMMAND, Cluster, start_cluster

FILES = 2000  # that a process of the cluster may have open: HAProxy takes 750 connections
MANY = 1000
IDLE_S = 60  # MANY connections are opened within it
PROBE = b"GET /-/healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    options = ("--engine", "simulated", "--replicas", "1", "--idle-timeout-s", str(IDLE_S))
    few_files = ("prlimit", f"--nofile={FILES}", *COMMAND)
    with start_cluster(*options, command=few_files) as cluster:
        yield cluster


def connected(cluster: Cluster) -> socket.socket:
    host, port = cluster.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10 * IDLE_S)


def test_more_idle_connections_than_haproxy_holds_shut_nobody_out(cluster: Cluster) -> None:
    with ExitStack() as all_of_them:
        answers = []
        for _ in range(MANY):
            connection = all_of_them.enter_context(connected(cluster))
            connection.sendall(PROBE)
            answers.append(connection.recv(4096))
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
        assert b"connection: close" not in answers[0]
        assert b"connection: close" in answers[-1]
        assert httpx.get(cluster.url + "/health", timeout=60).status_code == 200


def test_an_idle_connection_is_closed(cluster: Cluster) -> None:
    with connected(cluster) as connection:
        connection.sendall(PROBE)
        assert connection.recv(4096)
        assert connection.recv(4096) == b"", "within the socket's timeout"
