"""The manifests are what Kubernetes expects, and start what was tested.

No package has the schemas of KubeRay and the Prometheus operator: of their objects, the parts that
are Kubernetes' own are checked like the rest, and the other fields against the names listed here.
"""

import json
import subprocess
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from dashboards.build import files
from tests.support.repository import ROOT, load
from tests.support.untested import needs

SERVICES = load("deploy/compose.yaml")["services"]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSION = "1.34"
BUILTIN = {"v1", "apps/v1"}
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
    assert {document["kind"] for document in own} == {"Namespace", "Deployment", "Service"}
    for document in own:
        check(document)


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
    assert spec["rayClusterConfig"].keys() == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
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
    url = f"redis://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    for container in containers():
        told = {each["name"]: each["value"] for each in container["env"]}
        assert told == {"KVROUTE_REDIS_URL": url}
    assert len({container["image"] for container in containers()}) == 1


def test_workers_have_as_many_gpus_as_the_replicas_take() -> None:
    (application,) = load("deploy/serve.yaml")["applications"]
    _, worker = pod_groups()
    gpus = int(containers()[1]["resources"]["limits"]["nvidia.com/gpu"]) * worker["replicas"]
    assert gpus == application["args"]["replicas"] * application["args"]["gpus_per_replica"]


def test_the_index_is_the_same_as_in_the_compose_file() -> None:
    (redis,) = one("Deployment")["spec"]["template"]["spec"]["containers"]
    assert redis["image"] == SERVICES["redis"]["image"]
    assert redis["args"] == SERVICES["redis"]["command"]


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
        [each["kind"] for each in documents()] + ["ConfigMap"] * len(files())
    )
    places = [
        each["metadata"].get("namespace") for each in rendered() if each["kind"] != "Namespace"
    ]
    assert set(places) == {one("Namespace")["metadata"]["name"]}


@needs_kubectl
def test_grafanas_sidecar_finds_the_dashboards_whole() -> None:
    maps = [document for document in rendered() if document["kind"] == "ConfigMap"]
    for each in maps:
        check(each)
        assert each["metadata"]["labels"] == {"grafana_dashboard": "1"}
    held = {name: json.loads(text) for each in maps for name, text in each["data"].items()}
    assert held == {path.name: json.loads(text) for path, text in files().items()}
