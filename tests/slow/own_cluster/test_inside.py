"""Inside a cluster: Redis with TLS and a password, metrics in a range of ports behind a token."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import redis

from kvroute.doctor.checks import Check
from kvroute.local.ports import free_port, listen_error
from tests.support.certificates import certificate
from tests.support.documents import SECURITY, blocks
from tests.support.redis_server import redis_with_tls
from tests.support.serving import Cluster, doctor, findings, start_cluster
from tests.support.waiting import wait_until

TOKEN = "se-cret"
PASSWORD = "0123456789abcdef" * 2
PORTS = 1  # for a router and two replicas


@contextmanager
def environment(**given: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(f"{TOKEN}\n")
    return file


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """With TLS, for a user who may what security.md says."""
    pair = certificate(tmp_path_factory.mktemp("tls"))
    (block,) = (block.text for block in blocks(SECURITY) if "ACL SETUSER" in block.text)
    trusting = f"?ssl_ca_certs={pair[0]}"
    with redis_with_tls(pair) as url:
        with redis.Redis.from_url(url + trusting) as administrator:
            administrator.execute_command(*block.replace("PASSWORD", PASSWORD).split())
        at = urlsplit(url)
        yield f"rediss://kvroute:{PASSWORD}@127.0.0.1:{at.port}{trusting}"


@pytest.fixture(scope="module")
def ports() -> range:
    while True:
        first = free_port()
        found = range(first, first + PORTS)
        if all(listen_error("", port) is None for port in found):
            return found


@pytest.fixture(scope="module")
def cluster(redis_url: str, token_file: Path, ports: range) -> Iterator[Cluster]:
    with (
        environment(KVROUTE_REDIS_URL=redis_url),
        start_cluster(
            *("--engine", "simulated", "--replicas", "2", "--routers", "1"),
            *("--metrics-port-range", f"{ports[0]}-{ports[-1]}"),
            *("--metrics-token-file", str(token_file)),
        ) as cluster,
    ):
        yield cluster


def targets(cluster: Cluster) -> list[str]:
    found = httpx.get(f"{cluster.url}/v1/metrics/targets", timeout=10).raise_for_status().json()
    return sorted(target["targets"][0] for target in found)


def test_the_index_is_in_the_redis_with_tls(cluster: Cluster) -> None:
    health = httpx.get(f"{cluster.url}/health", timeout=10).json()
    assert health["index"]["reachable"]
    examined = {check.name: check.grade for check in findings(doctor(cluster, "--json"))}
    assert (examined["redis"], examined["canary"]) == ("ok", "ok")


def test_more_than_its_own_keys_its_user_may_not_touch(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        for forbidden in (("SET", "another", 1), ("FLUSHALL",), ("CONFIG", "SET", "save", "")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*forbidden)


def test_its_password_is_shown_to_nobody(cluster: Cluster, redis_url: str) -> None:
    assert PASSWORD in redis_url
    shown = [cluster.output(), doctor(cluster, "--json").stdout]
    for path in ("/health", "/v1/cluster", "/v1/cluster/diagnosis", "/v1/metrics/targets"):
        shown.append(httpx.get(f"{cluster.url}{path}", timeout=30).text)
    (logs,) = (line for line in shown[0].splitlines() if "logs: " in line)
    folder = Path(logs.partition("logs: ")[2])
    files = [file for file in folder.parent.rglob("*") if file.is_file()]
    assert len(files) > 5
    shown += [file.read_text(errors="replace") for file in files]
    shown += [" ".join(process.cmdline()) for process in cluster.processes()]
    assert not [text for text in shown if PASSWORD in text]


def test_metrics_are_on_the_ports_of_the_range_and_a_full_one_costs_only_metrics(
    cluster: Cluster, ports: range
) -> None:
    wait_until(lambda: targets(cluster) == [f"127.0.0.1:{port}" for port in ports])
    assert httpx.get(f"{cluster.url}/health", timeout=10).json()["replicas"] == 2
    _, missing = ports_checks(cluster)
    assert "of 2 replicas have no metrics" in missing.finding


def ports_checks(cluster: Cluster) -> list[Check]:
    return [check for check in findings(doctor(cluster, "--json")) if check.name == "ports"]


def test_only_who_sends_the_token_reads_them(cluster: Cluster, token_file: Path) -> None:
    for address in targets(cluster):
        url = f"http://{address}/metrics"
        with httpx.Client(timeout=30) as client:
            assert client.get(url).status_code == 401
            assert client.get(url, headers={"authorization": "Bearer no"}).status_code == 401
            told = client.get(url, headers={"authorization": f"Bearer {TOKEN}"}).text
        assert "kvroute_" in told
    check, _ = ports_checks(cluster)
    assert check.grade == "warning"
    assert "KVROUTE_METRICS_TOKEN_FILE" in check.remedy
    with environment(KVROUTE_METRICS_TOKEN_FILE=str(token_file)):
        check, _ = ports_checks(cluster)
    assert (check.grade, check.finding[:21]) == ("ok", "the metrics of 1 proc")
