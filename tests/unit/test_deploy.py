"""The files in deploy/ are valid for Ray, and start the versions that are tested."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema
from redis import AuthenticationError, Redis

from kvroute.app import build
from kvroute.local.ports import free_port
from kvroute.local.ray_cluster import _prepare_environment
from kvroute.settings.serve import ServeSettings
from kvroute.settings.serve_environment import serve_environment
from tests.support.repository import ROOT, load
from tests.support.settings_table import settings_table

NODE_SCRIPT = (ROOT / "deploy" / "node.sh").read_text()
CLUSTERS = ("cluster.yaml", "deploy/gcp.yaml", "deploy/on-premises.yaml")


def shipped_mounts(name: str) -> dict[str, str]:
    """Return the files of the checkout that a node gets."""
    mounts: dict[str, str] = load(name)["file_mounts"]
    return {there: here for there, here in mounts.items() if not here.startswith("~")}


def in_node_script(commands: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the commands with the functions of deploy/node.sh and another port for Redis."""
    functions = NODE_SCRIPT.partition("redis_port=6380\n")[2].rpartition('main "$@"')[0]
    functions = functions.partition('eval "$environment"\n')[2]
    token = "token=~/.ray/auth_token"
    assert token in NODE_SCRIPT
    script = f"set -euo pipefail\n{token}\n{functions}\n{commands}"
    checkout = home / "checkout"
    (checkout / ".venv").mkdir(parents=True, exist_ok=True)
    if not (checkout / ".venv" / "lib").exists():
        (checkout / ".venv" / "lib").symlink_to(Path(sys.prefix) / "lib")
    return subprocess.run(
        ["bash", "-c", script],
        cwd=checkout,
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_takes_the_cluster_file(name: str) -> None:
    validate_config(prepare_config(load(name)))


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_installs_no_version_of_its_own_choice(name: str) -> None:
    given, config = load(name), prepare_config(load(name))
    assert given["setup_commands"][-1] == "cd ~/kvroute && scripts/setup.sh gpu"
    assert config["worker_setup_commands"] == given["setup_commands"]
    on_head = given["setup_commands"] + given.get("head_setup_commands", [])
    assert config["head_setup_commands"] == on_head


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_node_starts_with_our_script(name: str) -> None:
    config = prepare_config(load(name))
    (head,), (worker,) = config["head_start_ray_commands"], config["worker_start_ray_commands"]
    assert head.endswith("~/kvroute/deploy/node.sh head")
    assert worker == "~/kvroute/deploy/node.sh worker"


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_files_that_a_node_gets_exist(name: str) -> None:
    mounts = shipped_mounts(name)
    assert mounts == {f"~/kvroute/{path}": path for path in mounts.values()}
    assert all((ROOT / path).exists() for path in mounts.values())


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_node_gets_rays_token_where_ray_looks_for_it(name: str) -> None:
    assert load(name)["file_mounts"]["~/.ray/auth_token"] == "~/.kvroute-token"
    assert serve_environment()["RAY_AUTH_MODE"] == "token"


def test_a_node_without_a_token_does_not_start(tmp_path: Path) -> None:
    done = in_node_script("check_token", tmp_path)
    assert done.returncode == 1
    assert "auth_token is missing; make one with: (umask 077; openssl rand" in done.stderr


def test_a_nodes_token_can_be_read_by_its_user_only(tmp_path: Path) -> None:
    token = give_token(tmp_path, "abc")
    token.chmod(0o644)
    assert in_node_script("check_token", tmp_path).returncode == 0
    assert token.stat().st_mode & 0o777 == 0o600


def test_every_node_derives_the_same_password_from_the_token(tmp_path: Path) -> None:
    passwords = []
    for name, token in (("head", "abc"), ("worker", "abc"), ("other", "abd")):
        give_token(tmp_path / name, token)
        passwords.append(in_node_script("redis_password", tmp_path / name).stdout.strip())
    head, worker, other = passwords
    assert re.fullmatch("[0-9a-f]{64}", head)
    assert head == worker != other


def test_the_heads_redis_needs_that_password_and_no_command_line_shows_it(tmp_path: Path) -> None:
    give_token(tmp_path, "abc")
    password = in_node_script("redis_password", tmp_path).stdout.strip()
    port = free_port()
    server = None
    try:
        done = in_node_script(f"redis_port={port}; start_redis", tmp_path)
        assert done.returncode == 0, done.stderr
        with Redis(port=port, password=password, decode_responses=True) as redis:
            server = psutil.Process(redis.info("server")["process_id"])
        with Redis(port=port) as stranger, pytest.raises(AuthenticationError):
            stranger.ping()
        assert not any(password in word for word in server.cmdline())
        again = in_node_script(f"redis_port={port}; start_redis", tmp_path)
        assert again.returncode == 0, "it runs already"
        give_token(tmp_path, "a new token")
        done = in_node_script(f"redis_port={port}; start_redis", tmp_path)
        assert done.returncode == 1
        assert f"for example with: fuser -k {port}/tcp" in done.stderr
    finally:
        if server is not None:
            server.kill()


def give_token(home: Path, token: str) -> Path:
    file = home / ".ray" / "auth_token"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(token)
    return file


def test_serve_accepts_the_application_file() -> None:
    config = ServeDeploySchema.model_validate(load("deploy/serve.yaml"))
    assert config.applications[0].import_path == f"{build.__module__}:{build.__name__}"


def test_the_application_file_has_settings_only_and_names_our_deployments() -> None:
    (application,) = load("deploy/serve.yaml")["applications"]
    assert all(f"`KVROUTE_{name.upper()}`" in settings_table() for name in application["args"])
    router = build(application["args"] | {"redis_url": "redis://127.0.0.1:6380"})
    assert [each["name"] for each in application["deployments"]] == [router._bound_deployment.name]


def test_a_shell_reads_the_environment_that_kvroute_serve_sets() -> None:
    """deploy/node.sh reads the environment in this way."""
    module = serve_environment.__module__
    assert f'environment=$(python -m {module})\neval "$environment"\n' in NODE_SCRIPT
    shell = f'eval "$({sys.executable} -m {module})" && env'
    shown = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True)
    assert {f"{name}={value}" for name, value in serve_environment().items()} <= {
        *shown.stdout.splitlines()
    }


def test_no_variable_of_rays_is_set_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", {})
    _prepare_environment(ServeSettings(), tmp_path)
    assert serve_environment().items() <= os.environ.items()
    assert not serve_environment().keys() & set(re.findall(r"\bRAY_\w+(?==)", NODE_SCRIPT))


def test_a_stream_may_last_as_long_as_its_router_drains() -> None:
    drain_timeout_s = ServeSettings.model_fields["drain_timeout_s"].default
    assert int(serve_environment()["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) >= drain_timeout_s


def test_a_router_never_closes_a_connection_that_haproxy_may_use_again() -> None:
    """HAProxy's clients have --idle-timeout-s."""
    script = (
        "from ray.serve._private.http_util import configure_http_options_with_defaults as made\n"
        "from ray.serve.config import HTTPOptions\n"
        "given = HTTPOptions()\n"
        "print(given.keep_alive_timeout_s, made(given).keep_alive_timeout_s)"
    )
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, **serve_environment()},
        check=True,
        capture_output=True,
        text=True,
    )
    clients_s, routers_s = map(int, shown.stdout.split())
    assert routers_s >= 100 * clients_s


def test_the_start_script_is_bash() -> None:
    subprocess.run(["bash", "-n", ROOT / "deploy" / "node.sh"], check=True)
