"""The manifests are what Kubernetes expects, and start what was tested.

No package has the schemas of KubeRay and the Prometheus operator: of their objects, the parts that
are Kubernetes' own are checked like the rest, and the other fields against the names listed here.
"""

import json
import subprocess
from base64 import b64decode
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from dashboards.build import files
from kvroute.settings import parsers
from kvroute.settings.help import flags
from kvroute.settings.serve import OPTIONS
from tests.support.documents import DEPLOYMENT, blocks
from tests.support.pods import Pod
from tests.support.repository import ROOT, load
from tests.support.untested import needs

SERVICES = load("deploy/compose.yaml")["services"]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSION = "1.34"
BUILTIN = {"v1", "apps/v1", "networking.k8s.io/v1"}
POD_GROUP = {"rayStartParams", "template"}
WORKER_GROUP = POD_GROUP | {"groupName", "replicas", "minReplicas", "maxReplicas"}

needs_kubectl = needs("kubectl")


def documents() -> list[dict[str, Any]]:
    """Every object of the folder, as it stands there."""
    names = load("deploy/kubernetes/kustomization.yaml")["resources"]
    texts = [(FOLDER / name).read_text() for name in names if name.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text)]


def one(kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents() if document["kind"] == kind]
    return found


def pod_groups() -> list[dict[str, Any]]:
    """The head's first."""
    config = one("RayService")["spec"]["rayClusterConfig"]
    return [config["headGroupSpec"], *config["workerGroupSpecs"]]


def containers() -> list[dict[str, Any]]:
    """Ray's, the head's first."""
    return [group["template"]["spec"]["containers"][0] for group in pod_groups()]


def check(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_every_object_of_kubernetes_own_fits_its_schema() -> None:
    own = [document for document in documents() if document["apiVersion"] in BUILTIN]
    kinds = {"Namespace", "Deployment", "Service", "NetworkPolicy"}
    assert {document["kind"] for document in own} == kinds
    for document in own:
        check(document)


def test_the_objects_of_kvroute_attach_fit_theirs_and_its_options_exist() -> None:
    text = (ROOT / "deploy/attach/kubernetes.yaml").read_text()
    objects = [*yaml.safe_load_all(text)]
    for document in objects:
        check(document)
    (deployed,) = [document for document in objects if document["kind"] == "Deployment"]
    (container,) = deployed["spec"]["template"]["spec"]["containers"]
    known = {flag for name, field in OPTIONS.items() for flag in flags(name, field)}
    assert {argument.partition("=")[0] for argument in container["args"]} <= known
    services = {each["metadata"]["name"] for each in objects if each["kind"] == "Service"}
    assert container["args"][0] == "--attach-dns=vllm-servers:8000"
    assert "vllm-servers" in services


def test_the_pods_of_the_ray_cluster_fit_theirs() -> None:
    for group in pod_groups():
        template = {"metadata": {}, **group["template"]}
        check(
            {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": "any"},
                "template": template,
            }
        )


def test_a_misspelt_field_does_not_fit() -> None:
    document = one("Deployment")
    document["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check(document)


def test_the_ray_service_has_fields_that_kuberay_knows() -> None:
    spec = one("RayService")["spec"]
    head, *workers = pod_groups()
    assert spec.keys() == {"serveConfigV2", "rayClusterConfig", "upgradeStrategy"}
    cluster = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    assert spec["rayClusterConfig"].keys() == cluster
    assert head.keys() == POD_GROUP
    assert all(worker.keys() == WORKER_GROUP for worker in workers)
    assert all(isinstance(each, str) for each in head["rayStartParams"].values())


def test_the_ray_service_starts_the_application_of_the_clusters() -> None:
    config = yaml.safe_load(one("RayService")["spec"]["serveConfigV2"])
    assert ServeDeploySchema.model_validate(config)
    assert config == load("deploy/serve.yaml")


def test_the_ray_service_has_the_ray_that_is_installed() -> None:
    lock = (ROOT / "requirements/gpu.lock").read_text()
    assert f"\nray=={one('RayService')['spec']['rayClusterConfig']['rayVersion']} " in lock


def test_every_pod_is_of_one_image_and_has_a_redis_that_exists() -> None:
    service = one("Service")
    at = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    for container in containers():
        secret, url = container["env"]
        assert secret["valueFrom"] == {"secretKeyRef": {"name": "kvroute-redis", "key": "password"}}
        told = {"name": "KVROUTE_REDIS_URL", "value": f"redis://:$({secret['name']})@{at}"}
        assert url == told
    assert len({container["image"] for container in containers()}) == 1


def test_no_pod_can_change_its_root_or_has_a_capability(tmp_path: Path) -> None:
    """tests/slow/image starts the pods so."""
    secrets = {"kvroute-redis": {"password": "secret", "redis.conf": "requirepass secret"}}
    for group in pod_groups():
        options = Pod(group["template"], secrets).options("pod", tmp_path)
        assert {"--read-only", "--cap-drop=ALL", "--user=1000"} <= {*options}
        assert "--env=KVROUTE_REDIS_URL=redis://:secret@kvroute-redis:6379" in options
        (container,) = group["template"]["spec"]["containers"]
        written = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert written == {"/tmp", "/home/kvroute"}


def test_workers_have_as_many_gpus_as_the_replicas_take() -> None:
    (application,) = load("deploy/serve.yaml")["applications"]
    _, worker = pod_groups()
    gpus = int(containers()[1]["resources"]["limits"]["nvidia.com/gpu"]) * worker["replicas"]
    assert gpus == application["args"]["replicas"] * application["args"]["gpus_per_replica"]


def test_the_index_is_the_same_as_in_the_compose_file() -> None:
    (redis,) = one("Deployment")["spec"]["template"]["spec"]["containers"]
    assert redis["image"] == SERVICES["redis"]["image"]
    assert redis["args"] == SERVICES["redis"]["command"]


def test_redis_has_the_password_of_the_secret() -> None:
    """Documents make it: password, and redis.conf, which is not on a command line."""
    pod = one("Deployment")["spec"]["template"]["spec"]
    (redis,), (volume,) = pod["containers"], pod["volumes"]
    (asks,) = redis["env"]
    (mount,) = redis["volumeMounts"]
    assert asks["name"] == "REDISCLI_AUTH", "what redis-cli reads in the probe"
    assert asks["valueFrom"]["secretKeyRef"] == {"name": "kvroute-redis", "key": "password"}
    assert mount["name"] == volume["name"]
    assert f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}" == redis["args"][1]
    made = shell_with("--from-file=password=")
    assert all(f"--from-file={key}=" in made for key in ("password", "redis.conf"))
    assert volume["secret"]["secretName"] in made


@needs_kubectl
def test_the_documented_command_makes_that_secret() -> None:
    making = f"{shell_with('--from-file=password=')} --dry-run=client --output json"
    done = subprocess.run(["bash", "-c", making], check=True, capture_output=True, text=True)
    data = json.loads(done.stdout)["data"]
    held = {name: b64decode(value).decode() for name, value in data.items()}
    assert len(held["password"]) == 64
    assert held == {
        "password": held["password"],
        "redis.conf": f"requirepass {held['password']}\n",
    }


def shell_with(text: str) -> str:
    """deployment.md's shell commands from the password on, up to the one with this text."""
    (found,) = [block.text for block in blocks(DEPLOYMENT) if text in block.text]
    making = found[found.index("password=$(") :]
    return making[: making.index("\nkubectl apply")]


HEAD, WORKER = (  # as KubeRay labels its pods
    {
        "ray.io/is-ray-node": "yes",
        "ray.io/node-type": kind,
        "app.kubernetes.io/name": "kuberay",
    }
    for kind in ("head", "worker")
)
REDIS = {"app": "kvroute-redis"}
OPERATORS = [  # of Helm, and of kustomize
    {"app.kubernetes.io/name": name, "app.kubernetes.io/component": "kuberay-operator"}
    for name in ("kuberay-operator", "kuberay")
]
STRANGER = {"app": "anything"}
HERE, MONITORING, ELSEWHERE = (
    {"kubernetes.io/metadata.name": name} for name in ("kvroute", "monitoring", "elsewhere")
)


def reached(pod: dict[str, str], port: int, *, by: dict[str, str], at: dict[str, str]) -> bool:
    """Whether the policies let that pod of that namespace in, as Kubernetes' documents say. Without
    any that names the pod everybody would be."""
    policies = [document["spec"] for document in documents() if document["kind"] == "NetworkPolicy"]
    about = [spec for spec in policies if selects(spec["podSelector"], pod)]
    assert about
    return any(lets(rule, port, by, at) for spec in about for rule in spec.get("ingress", []))


def lets(rule: dict[str, Any], port: int, by: dict[str, str], at: dict[str, str]) -> bool:
    """A rule without ports is for all of them, and one without peers for everybody."""
    ports, peers = rule.get("ports", [{"port": 1, "endPort": 65535}]), rule.get("from")
    is_port = any(each["port"] <= port <= each.get("endPort", each["port"]) for each in ports)
    return is_port and (peers is None or any(is_peer(peer, by, at) for peer in peers))


def is_peer(peer: dict[str, Any], by: dict[str, str], at: dict[str, str]) -> bool:
    """One without a namespace is of the policy's own."""
    there = selects(peer["namespaceSelector"], at) if "namespaceSelector" in peer else at == HERE
    return there and selects(peer.get("podSelector", {}), by)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def container_port(name: str) -> int:
    (port,) = (
        container["containerPort"]
        for container in containers()[0]["ports"]
        if container["name"] == name
    )
    return int(port)


def test_everybody_reaches_the_endpoint_and_nothing_else() -> None:
    config = yaml.safe_load(one("RayService")["spec"]["serveConfigV2"])
    endpoint = config["http_options"]["port"]
    assert endpoint == container_port("serve")
    for at in (HERE, ELSEWHERE):
        assert reached(HEAD, endpoint, by=STRANGER, at=at)
        for port in (endpoint, 8265, 6379, 10001, 20000, 9400):
            assert not reached(WORKER, port, by=STRANGER, at=at)
            assert not reached(REDIS, port, by=STRANGER, at=at)
            assert not reached(STRANGER, port, by=STRANGER, at=at)
            assert port == endpoint or not reached(HEAD, port, by=STRANGER, at=at)


def test_rays_nodes_reach_all_of_each_other_and_nobody_with_their_labels_elsewhere_does() -> None:
    for port in (1, container_port("gcs-server"), 20000, 65535):
        assert reached(HEAD, port, by=WORKER, at=HERE)
        assert reached(WORKER, port, by=HEAD, at=HERE)
        assert not reached(WORKER, port, by=HEAD, at=ELSEWHERE)


def test_redis_is_for_rays_nodes() -> None:
    (port,) = (each["port"] for each in one("Service")["spec"]["ports"])
    pod = one("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert pod == REDIS
    for node in (HEAD, WORKER):
        assert reached(pod, port, by=node, at=HERE)
        assert not reached(pod, port, by=node, at=ELSEWHERE)
    assert not reached(pod, port, by=STRANGER, at=MONITORING)


def test_prometheus_reaches_the_metrics_and_kuberay_the_dashboard() -> None:
    config = yaml.safe_load(one("RayService")["spec"]["serveConfigV2"])
    ports = parsers.ports(config["applications"][0]["args"]["metrics_port_range"])
    for pod in (HEAD, WORKER):
        for port in (ports[0], ports[-1]):
            assert reached(pod, port, by=STRANGER, at=MONITORING)
            assert not reached(pod, port, by=STRANGER, at=ELSEWHERE)
        for port in (ports[0] - 1, ports[-1] + 1):
            assert not reached(pod, port, by=STRANGER, at=MONITORING)
    for operator in OPERATORS:
        assert reached(HEAD, container_port("dashboard"), by=operator, at=ELSEWHERE)
        assert not reached(WORKER, container_port("dashboard"), by=operator, at=ELSEWHERE)
    for stranger in (STRANGER, HEAD, WORKER):
        assert not reached(HEAD, container_port("dashboard"), by=stranger, at=ELSEWHERE)


def test_ray_asks_for_its_token() -> None:
    assert one("RayService")["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_prometheus_is_told_where_to_find_everyone() -> None:
    """As in our own configuration of it, at the service that KubeRay makes of the name."""
    spec = one("ScrapeConfig")["spec"]
    (job,) = load("deploy/prometheus/prometheus.yml")["scrape_configs"]
    (found,), (ours,) = spec["httpSDConfigs"], job["http_sd_configs"]
    host = f"http://{one('RayService')['metadata']['name']}-serve-svc.kvroute.svc:8000"
    assert spec.keys() == {"jobName", "scrapeInterval", "httpSDConfigs"}
    assert spec["jobName"] == job["job_name"]
    assert found == {
        "url": ours["url"].replace("http://127.0.0.1:8000", host),
        "refreshInterval": ours["refresh_interval"],
    }


def test_every_dashboard_is_a_config_map() -> None:
    generated = load("dashboards/kustomization.yaml")["configMapGenerator"]
    assert {name for each in generated for name in each["files"]} == {path.name for path in files()}


@cache
def rendered() -> list[dict[str, Any]]:
    """What `kubectl apply -k` sends."""
    command = ["kubectl", "kustomize", str(FOLDER)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return list(yaml.safe_load_all(text))


@needs_kubectl
def test_kustomize_makes_all_of_it_and_puts_it_in_one_namespace() -> None:
    kinds = [document["kind"] for document in rendered()]
    assert sorted(kinds) == sorted(
        [document["kind"] for document in documents()] + ["ConfigMap"] * len(files())
    )
    places = [
        each["metadata"].get("namespace") for each in rendered() if each["kind"] != "Namespace"
    ]
    assert set(places) == {one("Namespace")["metadata"]["name"]}


@needs_kubectl
def test_grafanas_sidecar_finds_the_dashboards_whole() -> None:
    maps = [document for document in rendered() if document["kind"] == "ConfigMap"]
    for map_ in maps:
        check(map_)
        assert map_["metadata"]["labels"] == {"grafana_dashboard": "1"}
    held = {name: json.loads(text) for map_ in maps for name, text in map_["data"].items()}
    assert held == {path.name: json.loads(text) for path, text in files().items()}
