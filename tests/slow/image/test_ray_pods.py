"""The pods of deploy/kubernetes, started as KubeRay starts them: a head and the workers.

The values are those of the files, except the model and the engine, since there are no GPUs.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    shared_memory,
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

    network: ContainerNetwork
    folder: Path  # for the files of secrets
    redis: Container
    head: Container
    workers: list[Container]

    def add_worker(self) -> None:
        """Start one more pod of the group of workers."""
        hosts = {REDIS_SERVICE["metadata"]["name"]: self.redis, HEAD_SERVICE: self.head}
        name = f"worker{len(self.workers)}"
        self.workers.append(start(self.network, WORKERS, name, self.folder, hosts))

    def cluster(self) -> dict[str, str]:
        """Return the replicas in the index: id -> address."""
        answer = httpx.get(f"{self.head.url}/v1/cluster", timeout=300).raise_for_status()
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
    head = start(network, CLUSTER["headGroupSpec"], "head", folder, hosts)
    wait_for(head, RAYLET_PROBE, GCS_PROBE)
    pods = Pods(network, folder, redis, head, [])
    for _ in range(WORKERS["replicas"]):
        pods.add_worker()
    for worker in pods.workers:
        wait_for(worker, RAYLET_PROBE)
    deploy(head)
    head.wait_for_health()
    wait_until(lambda: len(pods.cluster()) == WORKERS["replicas"], within_s=START_S)
    return pods


def start(
    network: ContainerNetwork,
    group: Mapping[str, Any],
    name: str,
    folder: Path,
    hosts: Mapping[str, Container],
) -> Container:
    """Start a pod of a group of Ray's nodes."""
    is_head = HEAD_SERVICE not in hosts
    return network.start(
        IMAGE,
        # As in Kubernetes: `ray start` gives up after 30 s, which is too short on a busy machine.
        "--restart=on-failure",
        shared_memory(group),
        *Pod(group["template"], SECRETS).options(f"{network.bridge}-{name}", folder),
        *ray_environment(TOKEN, is_head=is_head),
        command=ray_start(group, is_head=is_head),
        hosts=hosts,
    )


def wait_for(container: Container, *probes: str) -> None:
    """Wait until probes succeed. They run in the container."""
    command = ("bash", "-c", " && ".join(probes))

    wait_until(lambda: container.execute(*command).returncode == 0, within_s=START_S)


def deploy(head: Container) -> None:
    """Deploy the application as KubeRay's operator does."""
    config = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    application["args"] |= {"model": BUILTIN_MODEL, "engine": "simulated"}
    url = f"http://{head.address}:{DASHBOARD_PORT}/api/serve/applications/"
    bearer = {"authorization": f"Bearer {TOKEN}"}
    httpx.put(url, json=config, headers=bearer, timeout=START_S).raise_for_status()
    assert httpx.put(url, json=config, timeout=START_S).status_code in (401, 403)


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


def test_a_deleted_worker_gives_its_replica_to_a_new_one(pods: Pods) -> None:
    """The last test. Kubernetes runs the preStop command before it stops the pod."""
    (container,) = WORKERS["template"]["spec"]["containers"]
    leaving = pods.workers[0]
    pods.add_worker()
    wait_for(pods.workers[-1], RAYLET_PROBE)
    done = leaving.execute(*container["lifecycle"]["preStop"]["exec"]["command"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert leaving.address not in pods.cluster().values()
    leaving.stop(10)
    rest = {worker.address for worker in pods.workers[1:]}
    wait_until(lambda: {*pods.cluster().values()} == rest, within_s=START_S)
    with OpenAI(base_url=f"{pods.head.url}/v1", api_key="none", max_retries=0) as client:
        assert ask(client, user("Hello")).text
