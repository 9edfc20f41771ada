"""The services of deploy/compose.yaml, with the file's own values.

Redis and Prometheus are Debian's, since there is no registry with the images that the file names.
"""

import secrets

import pytest
from openai import OpenAI

from tests.support.compose import Compose
from tests.support.containers import Container, ContainerNetwork
from tests.support.images import IMAGE, Images
from tests.support.prometheus_server import Prometheus
from tests.support.waiting import wait_until
from tests.support.workloads import ask, user

pytestmark = pytest.mark.timeout(1800)
PASSWORD = secrets.token_hex(32)
REPLICAS = 2  # KVROUTE_REPLICAS of the file


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Compose:
    return Compose(tmp_path_factory.mktemp("compose"), {"INDEX_PASSWORD": PASSWORD})


@pytest.fixture(scope="module")
def redis(images: Images, network: ContainerNetwork, compose: Compose) -> Container:
    image = images.build_debian("redis-server")
    redis = network.start(image, *compose.options("redis"), command=compose.command("redis"))
    wait_until(lambda: redis.execute(*compose.health_check("redis")).returncode == 0)
    return redis


@pytest.fixture(scope="module")
def kvroute(network: ContainerNetwork, compose: Compose, redis: Container) -> Container:
    return start_kvroute(network, compose, redis)


def start_kvroute(network: ContainerNetwork, compose: Compose, redis: Container) -> Container:
    container = network.start(
        IMAGE,
        *compose.options("kvroute"),
        command=compose.command("kvroute"),
        hosts={"redis": redis},
    )
    container.wait_for_health()
    return container


def openai(container: Container) -> OpenAI:
    return OpenAI(base_url=f"{container.url}/v1", api_key="none", max_retries=0, timeout=300)


def test_the_health_check_of_the_file_passes(kvroute: Container, compose: Compose) -> None:
    assert kvroute.execute(*compose.health_check("kvroute")).returncode == 0


def test_chats_are_found_in_the_cache(kvroute: Container) -> None:
    with openai(kvroute) as client:
        messages = user("word " * 200)
        answer = ask(client, messages)
        messages += [{"role": "assistant", "content": answer.text}, *user("And now?")]
        assert ask(client, messages).cached_tokens >= 200


def test_the_index_is_in_that_redis_and_needs_its_password(
    redis: Container, kvroute: Container
) -> None:
    assert kvroute.logs()
    keys = redis.execute("redis-cli", "--scan", "--pattern", "*kvroute*").stdout.splitlines()
    assert keys
    refused = redis.execute("env", "-u", "REDISCLI_AUTH", "redis-cli", "dbsize")
    assert "NOAUTH" in refused.stdout + refused.stderr


@pytest.mark.parametrize("service", ["redis", "kvroute"])
def test_the_password_is_on_no_command_line(service: str, request: pytest.FixtureRequest) -> None:
    container: Container = request.getfixturevalue(service)
    lines = container.execute("sh", "-c", "cat /proc/[0-9]*/cmdline").stdout
    assert service.removeprefix("kv") in lines
    assert PASSWORD not in lines


def test_prometheus_reads_the_metrics_of_every_process(
    images: Images, network: ContainerNetwork, compose: Compose, kvroute: Container
) -> None:
    assert compose.service("prometheus")["network_mode"] == "service:kvroute"
    image = images.build_debian("prometheus", entrypoint="prometheus")
    network.start_beside(
        kvroute, image, *compose.options("prometheus"), command=compose.command("prometheus")
    )
    server = Prometheus(f"http://{kvroute.address}:9090")

    def all_are_up() -> bool:
        try:
            targets = server.get("targets", state="active")["activeTargets"]
        except (OSError, AssertionError):  # it starts: no answer, or status 503
            return False
        return len(targets) > REPLICAS and all(target["health"] == "up" for target in targets)

    wait_until(all_are_up)
    wait_until(lambda: server.values("kvroute_replicas") == [REPLICAS])


def test_a_new_container_finds_the_files_of_the_old_one(
    network: ContainerNetwork, compose: Compose, redis: Container, kvroute: Container
) -> None:
    """As with `docker compose up --force-recreate`. The last test: it stops the container."""
    with openai(kvroute) as client:
        file = client.files.create(file=("questions.jsonl", b"{}\n"), purpose="batch")
    grace = compose.service("kvroute")["stop_grace_period"]
    assert kvroute.stop(int(grace.removesuffix("s"))) == 0, kvroute.logs()
    with openai(start_kvroute(network, compose, redis)) as client:
        assert client.files.content(file.id).content == b"{}\n"
