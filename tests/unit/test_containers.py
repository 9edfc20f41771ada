"""The image and the compose file name what exists, and start what was tested."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from compose_spec import PyCompose

from kvroute.settings.serve_environment import serve_environment
from tests.support.compose import Compose
from tests.support.repository import ROOT, files_named, load
from tests.support.serving import KVROUTE
from tests.support.settings_table import settings_table

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE_FILES = ("deploy/compose.yaml", "deploy/compose.gpu.yaml")
SERVICES = load("deploy/compose.yaml")["services"]


def copied() -> set[str]:
    """What the image is given of the checkout."""
    lines = re.findall(r"^COPY ((?!--from).+) \S+$", DOCKERFILE, flags=re.MULTILINE)
    return {name for line in lines for name in line.split()}


@pytest.mark.parametrize("file", ["Dockerfile", "attach/Dockerfile"])
def test_hadolint_finds_no_fault_with_the_dockerfile(file: str) -> None:
    command = [f"{sys.prefix}/bin/hadolint", str(DEPLOY / file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_gets_what_a_machine_of_a_cluster_gets() -> None:
    given = load("cluster.yaml")["file_mounts"].values()
    mounted = {path for path in given if not path.startswith("~")}
    assert copied() == mounted
    assert all((ROOT / name).exists() for name in copied())


def test_the_build_is_shown_that_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    shown = {path.name for line in lines if line[0] == "!" for path in ROOT.glob(line[1:])}
    assert "*" in lines
    assert shown == copied()


def test_the_image_is_installed_by_the_setup_script() -> None:
    assert 'scripts/setup.sh "$PROFILE"' in DOCKERFILE


def test_a_container_writes_only_below_its_home_folder_and_tmp() -> None:
    """In both files, and as an unprivileged user: a test of tests/slow/image runs it so."""
    ours = SERVICES["kvroute"]
    assert ours["read_only"] is True
    assert [mount.partition(":")[0] for mount in ours["tmpfs"]] == ["/tmp"]
    assert [mount.partition(":")[2] for mount in ours["volumes"]] == ["/home/kvroute"]


def test_the_image_starts_a_command_that_exists() -> None:
    (command,) = re.findall(r"^CMD (.+)$", DOCKERFILE, flags=re.MULTILINE)
    name, *arguments = json.loads(command)
    assert f'\n{name} = "kvroute.cli:main"\n' in (ROOT / "pyproject.toml").read_text()
    subprocess.run([*KVROUTE, *arguments, "--help"], check=True, capture_output=True)


def test_ray_starts_in_the_image_as_on_every_node() -> None:
    told = dict(re.findall(r"\b(RAY_\w+)=(\S+)", DOCKERFILE))
    assert files_named(serve_environment()) == files_named(told)


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_the_compose_file_is_one(name: str) -> None:
    PyCompose.from_yaml((ROOT / name).read_text()).validate()


@pytest.mark.parametrize("service", ["redis", "kvroute", "prometheus"])
def test_the_tests_of_the_image_know_every_key_of_a_service(service: str, tmp_path: Path) -> None:
    """tests/slow/image runs these services."""
    options = Compose(tmp_path, {"INDEX_PASSWORD": "secret"}).options(service)
    assert options
    assert not any("${" in option for option in options)


def test_a_misspelt_compose_file_is_none() -> None:
    with pytest.raises(ValueError, match="helthcheck"):
        PyCompose.from_yaml("services: {redis: {image: redis, helthcheck: {}}}")


def test_the_gpu_file_changes_only_what_is_there() -> None:
    assert load("deploy/compose.gpu.yaml")["services"].keys() <= SERVICES.keys()


def test_every_image_has_a_version() -> None:
    images = {service["image"] for service in SERVICES.values() if "build" not in service}
    assert all(re.search(r":v?\d+\.\d+", image) for image in images)


def test_the_compose_file_has_settings_that_exist() -> None:
    assert all(f"`{name}`" in settings_table() for name in SERVICES["kvroute"]["environment"])


def test_the_index_is_never_evicted_for_memory() -> None:
    assert "--maxmemory-policy noeviction" in " ".join(SERVICES["redis"]["command"])


def test_redis_asks_for_a_password_that_is_on_no_command_line() -> None:
    redis, ours = SERVICES["redis"], SERVICES["kvroute"]
    (config,) = redis["configs"]
    content = load("deploy/compose.yaml")["configs"][config["source"]]["content"]
    assert content == "requirepass ${INDEX_PASSWORD}"
    assert redis["command"][1] == config["target"]
    assert redis["environment"]["REDISCLI_AUTH"].startswith("${INDEX_PASSWORD:?")
    assert ours["environment"]["KVROUTE_REDIS_URL"] == "redis://:${INDEX_PASSWORD}@redis:6379"


def test_the_password_is_in_no_commit_and_no_image() -> None:
    for name in (".gitignore", ".dockerignore"):
        assert "deploy/.env" in (ROOT / name).read_text().splitlines()


def test_what_is_mounted_exists() -> None:
    volumes = load("deploy/compose.yaml")["volumes"]
    for service in SERVICES.values():
        for source, *_ in (mount.split(":") for mount in service.get("volumes", [])):
            assert source in volumes or (DEPLOY / source).is_dir()


def test_prometheus_and_grafana_read_our_own_files() -> None:
    """At loopback addresses, in the network namespace that they share with the cluster."""
    prometheus, grafana = SERVICES["prometheus"], SERVICES["grafana"]
    assert prometheus["network_mode"] == grafana["network_mode"] == "service:kvroute"
    assert "./prometheus:/etc/prometheus:ro" in prometheus["volumes"]
    assert f"../dashboards:{grafana['environment']['KVROUTE_DASHBOARDS']}:ro" in grafana["volumes"]
