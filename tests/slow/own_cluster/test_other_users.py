"""Other users and other computers reach nothing of a cluster but its address."""

import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest
from redis import AuthenticationError, Redis

from tests.support.certificates import certificate
from tests.support.serving import Cluster, start_cluster
from tests.support.waiting import wait_until

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
NOBODY = 65534  # the user id
PROBE = 'for path; do test -r "$path" && echo "$path"; test -x "$path" && echo "$path"; done; true'


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def cluster(certified: tuple[Path, Path]) -> Iterator[Cluster]:
    cert, key = map(str, certified)
    options = ("--engine", "simulated", "--replicas", "1", "--tls-cert", cert, "--tls-key", key)
    with start_cluster(*options) as cluster:
        assert f"kvroute ready at https{cluster.url.removeprefix('http')}" in cluster.output()
        yield replace(cluster, url=cluster.url.replace("http:", "https:"))


def of_each(cluster: Cluster, name: str, read: Callable[[psutil.Process], list[T]]) -> list[T]:
    """What is read of the processes of that name, once there is something. Of HAProxy there may be
    two: one takes over from another, which finishes its requests."""
    found: list[T] = []

    def is_read() -> bool:
        for process in cluster.named(name):
            with suppress(psutil.NoSuchProcess):
                found.extend(read(process))
        return bool(found)

    wait_until(is_read)
    return found


def listens_at(process: psutil.Process) -> list[Any]:
    connections = process.net_connections("inet")
    return [
        connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN
    ]


def trusting(certified: tuple[Path, Path]) -> httpx.Client:
    return httpx.Client(verify=ssl.create_default_context(cafile=certified[0]), timeout=10)


def is_http(port: int) -> bool:
    with suppress(httpx.HTTPError):
        httpx.get(f"http://{LOOPBACK}:{port}/", timeout=5)
        return True
    return False


def test_the_endpoint_is_https_and_nothing_else(
    cluster: Cluster, certified: tuple[Path, Path]
) -> None:
    with trusting(certified) as client:
        url = f"{cluster.url}/v1/completions"
        body = {"prompt": "Hi", "max_tokens": 2}
        answer = client.post(url, json=body)
        assert (answer.status_code, answer.http_version) == (200, "HTTP/1.1")
        with client.stream("POST", url, json=body | {"stream": True}) as stream:
            assert "data: [DONE]" in [*stream.iter_lines()]
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{cluster.url}/health")
    with pytest.raises(httpx.RemoteProtocolError, match="without sending a response"):
        httpx.get(f"{cluster.url.replace('https', 'http')}/health")


def test_what_it_serves_is_reached_from_this_computer_only(
    cluster: Cluster, certified: tuple[Path, Path]
) -> None:
    """Ray's own servers, which ask for its token, are reached from everywhere."""
    with trusting(certified) as client:
        targets = client.get(f"{cluster.url}/v1/metrics/targets").json()
    assert {target["targets"][0].rpartition(":")[0] for target in targets} == {LOOPBACK}
    for name in ("haproxy", "redis-server"):
        addresses = of_each(cluster, name, listens_at)
        assert {address.ip for address in addresses} == {LOOPBACK}
    (router,) = cluster.routers()
    http = [address for address in listens_at(router) if is_http(address.port)]
    assert len(http) == 2, "its own, and its metrics"
    assert {address.ip for address in http} == {LOOPBACK}


@pytest.mark.skipif(psutil.Process().uids().real != 0, reason="only root can be another user")
def test_another_user_reads_none_of_its_files_and_asks_nothing_of_its_redis(
    cluster: Cluster,
) -> None:
    arguments = of_each(cluster, "haproxy", psutil.Process.cmdline)
    (config,) = {argument for argument in arguments if argument.endswith(".cfg")}
    opened = {file.path for process in cluster.processes() for file in process.open_files()}
    paths = {path for path in opened if path.startswith(str(Path(config).parents[2]))}
    assert len(paths) > 5
    paths |= {config, *map(str, Path(config).parents[:-2])}  # all but / and /tmp
    paths.add(str(Path.home() / ".ray" / "auth_token"))
    command = ["sh", "-c", PROBE, "sh", *sorted(paths)]
    probed = subprocess.run(command, user=NOBODY, capture_output=True, text=True)
    assert (probed.stdout, probed.returncode) == ("", 0), probed.stderr
    (address,) = of_each(cluster, "redis-server", listens_at)
    stranger = Redis(host=address.ip, port=address.port)
    with stranger, pytest.raises(AuthenticationError):
        stranger.ping()
