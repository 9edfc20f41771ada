"""The pods of deploy/kubernetes, started as KubeRay starts them: a head and the workers.

The values are those of the files, except the model and the engine, since there are no GPUs.
"""

import secrets
from dataclasses import dataclass

import httpx
import pytest
import yaml
from openai import OpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.containers import START_S, Container, ContainerNetwork
from tests.support.images import IMAGE, Images
from tests.support.pods import (
    DASHBOARD_PORT,
    GCS_PROBE,
    HEAD_SERVICE,
    NODE_PROBE,
    RAYLET_PROBE,
    Pod,
    documents,
    ray_environment,
    ray_start,
)
from tests.support.waiting import wait_until
from tests.support.workloads import ask, user

pytestmark = pytest.mark.timeout(1800)
PASSWORD, TOKEN = secrets.token_hex(32), secrets.token_hex(32)
# As docs/deployment.md makes it.
SECRETS = {"kvroute-redis": {"password": PASSWORD, "redis.conf": f"requirepass {PASSWORD}\n"}}
(SERVICE,) = documents("rayservice.yaml")
DEPLOYMENT, REDIS_SERVICE = documents("redis.yaml")
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]


@dataclass(frozen=True)
class Pods:
    """The running pods."""

    redis: Container
    head: Container
    workers: list[Container]

    def cluster(self) -> dict[str, str]:
        """Return the replicas in the index: id -> address."""
        answer = httpx.get(f"{self.head.url}/v1/cluster", timeout=10).raise_for_status()
        return {replica["id"]: replica["node"] for replica in answer.json()["replicas"]}


@pytest.fixture(scope="module")
def pods(
    images: Images, network: ContainerNetwork, tmp_path_factory: pytest.TempPathFactory
) -> Pods:
    folder = tmp_path_factory.mktemp("pods")
    redis_pod = Pod(DEPLOYMENT["spec"]["template"], SECRETS)
    redis = network.start(
        images.build_debian("redis-server"),
        *redis_pod.options(f"{network.bridge}-redis", folder),
        command=tuple(redis_pod.container["args"]),
    )
    probe = redis_pod.container["readinessProbe"]["exec"]["command"]
    wait_until(lambda: redis.execute(*probe).returncode == 0)
    hosts = {REDIS_SERVICE["metadata"]["name"]: redis}

    def start(group: dict[str, object], name: str, *, is_head: bool) -> Container:
        pod = Pod(group["template"], SECRETS)  # type: ignore[arg-type]
        return network.start(
            IMAGE,
            "--shm-size=2g",
            *pod.options(f"{network.bridge}-{name}", folder),
            *ray_environment(TOKEN, is_head=is_head),
            command=ray_start(group, is_head=is_head),
            hosts=hosts,
        )

    head = start(CLUSTER["headGroupSpec"], "head", is_head=True)
    hosts[HEAD_SERVICE] = head
    wait_for(head, RAYLET_PROBE, GCS_PROBE)
    workers = [start(WORKERS, f"worker{i}", is_head=False) for i in range(WORKERS["replicas"])]
    deploy(head)
    pods = Pods(redis, head, workers)
    head.wait_for_health()
    wait_until(lambda: len(pods.cluster()) == WORKERS["replicas"], within_s=START_S)
    return pods


def wait_for(container: Container, *probes: str) -> None:
    """Wait until probes succeed. They run in the container."""
    command = ("bash", "-c", " && ".join(probes))

    def succeeds() -> bool:
        assert container.state()["Running"], container.logs()
        return container.execute(*command).returncode == 0

    wait_until(succeeds, within_s=START_S)


def deploy(head: Container) -> None:
    """Deploy the application as KubeRay's operator does."""
    config = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    application["args"] |= {"model": BUILTIN_MODEL, "engine": "simulated"}
    url = f"http://{head.address}:{DASHBOARD_PORT}/api/serve/applications/"
    bearer = {"authorization": f"Bearer {TOKEN}"}
    httpx.put(url, json=config, headers=bearer, timeout=60).raise_for_status()
    assert httpx.put(url, json=config, timeout=60).status_code in (401, 403)


def test_each_worker_has_a_replica(pods: Pods) -> None:
    assert {*pods.cluster().values()} == {worker.address for worker in pods.workers}


def test_prompts_are_found_in_the_cache_of_a_worker(pods: Pods) -> None:
    with OpenAI(base_url=f"{pods.head.url}/v1", api_key="none", max_retries=0) as client:
        first, second = (ask(client, user("word " * 200)) for _ in range(2))
    assert (first.cached_tokens, second.replica) == (0, first.replica)
    assert second.cached_tokens > 0


def test_the_probes_of_kuberay_succeed_in_every_pod(pods: Pods) -> None:
    wait_for(pods.head, RAYLET_PROBE, GCS_PROBE)
    for container in (pods.head, *pods.workers):
        wait_for(container, RAYLET_PROBE)
        answer = httpx.get(f"http://{container.address}{NODE_PROBE}", timeout=10)
        assert answer.status_code == 200, answer.text


def test_a_worker_waits_for_the_head_with_rays_command(pods: Pods) -> None:
    """The command of KubeRay's init container of workers."""
    address = f"{HEAD_SERVICE}:6379"
    done = pods.workers[0].execute("bash", "-c", f"ray health-check --address {address}")
    assert done.returncode == 0, done.stderr


def test_prometheus_can_read_the_metrics_of_every_process(pods: Pods) -> None:
    """At the addresses that the ScrapeConfig gets, in the range that the network policy opens."""
    (scrape,) = documents("scrape.yaml")
    path = httpx.URL(scrape["spec"]["httpSDConfigs"][0]["url"]).path
    groups = httpx.get(f"{pods.head.url}{path}", timeout=10).json()
    targets = [target for group in groups for target in group["targets"]]
    assert {target.partition(":")[0] for target in targets} == {
        container.address for container in (pods.head, *pods.workers)
    }
    for target in targets:
        assert 9400 <= int(target.partition(":")[2]) <= 9499
        assert "kvroute_" in httpx.get(f"http://{target}/metrics", timeout=10).text


def test_a_lost_worker_is_noticed_and_the_rest_serves(pods: Pods) -> None:
    """The last test: Kubernetes deletes a pod."""
    pods.workers[0].stop(30)
    lost = pods.workers[0].address
    wait_until(lambda: lost not in pods.cluster().values(), within_s=START_S)
    with OpenAI(base_url=f"{pods.head.url}/v1", api_key="none", max_retries=0) as client:
        assert ask(client, user("Hello")).text
