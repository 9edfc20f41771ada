"""A cluster on several hosts for tests, started with `ray up deploy/on-premises.yaml`."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kvroute.process.builtin_model import BUILTIN_MODEL, folder, resolve
from tests.support.hosts import HOME, Host, Network, network, why_not

ROOT = Path(__file__).parents[2]
SHIPPED = ("kvroute", "deploy")  # folders of the checkout that are copied to the hosts
REPLICA_PROCESS = "ray::ServeRepli"  # name of a replica's process, which Linux truncates here
GPUS = 2  # number of GPUs that each worker reports; simulated engines need none
START_S = 480.0  # timeout of `ray up` and of the start of the replicas, in seconds
TOKEN = secrets.token_hex(32)  # Ray's authentication token
OBSTACLE = why_not()
ON_NODES = (  # marks of tests that use nodes
    pytest.mark.nodes,
    pytest.mark.skipif(OBSTACLE is not None, reason=OBSTACLE or ""),
)
OPTIONS = {"up": ("--yes", "--no-config-cache"), "down": ("--yes",), "exec": ()}


@dataclass(frozen=True)
class Nodes:
    """The running cluster."""

    network: Network
    head: Host
    workers: tuple[Host, ...]
    file: Path  # configuration file for `ray up`

    @property
    def hosts(self) -> tuple[Host, ...]:
        return (self.head, *self.workers)

    @property
    def url(self) -> str:
        return f"http://{self.head.address}:8000"

    def index(self) -> dict[str, str]:
        """Return the replicas in the index: id -> address."""
        answer = httpx.get(f"{self.url}/v1/cluster", timeout=10).raise_for_status()
        return {replica["id"]: replica["node"] for replica in answer.json()["replicas"]}

    def check_deployed(self) -> None:
        """Fail if Serve could not deploy the application."""
        try:
            application = self._application()
        except (subprocess.CalledProcessError, KeyError):
            return
        assert application["status"] != "DEPLOY_FAILED", application["message"][-1000:]

    def serving(self) -> dict[str, str]:
        """Return the replicas to which Serve sends requests: id -> address."""
        replicas = self._application()["deployments"]["Replica"]["replicas"]
        return {
            replica["replica_id"]: replica["node_ip"]
            for replica in replicas
            if replica["state"] == "RUNNING"
        }

    def _application(self) -> dict[str, Any]:
        """Return what Serve says of the application."""
        api = "http://127.0.0.1:8265/api/serve/applications/"  # only reachable on the head
        inside = ("nsenter", "--net", "--target", str(self.head.init.pid))
        key = ("--header", f"Authorization: Bearer {TOKEN}")
        curl = ("curl", "--silent", "--fail", "--max-time", "10", *key, api)
        output = subprocess.run([*inside, *curl], check=True, capture_output=True).stdout
        application: dict[str, Any] = json.loads(output)["applications"]["kvroute"]
        return application

    def processes(self) -> Counter[str]:
        """Count the replicas' processes at each address."""
        return Counter(
            host.address
            for host in self.workers
            for process in host.processes()
            if process.name().startswith(REPLICA_PROCESS)
        )

    def views(self) -> tuple[dict[str, str], dict[str, str], Counter[str]]:
        """Return the replicas according to the index, to Serve, and to the hosts' processes."""
        return self.index(), self.serving(), self.processes()

    def ray(self, verb: str, *words: str) -> str:
        """Run `ray up`, `ray down` or `ray exec`; return its output. Fails if the command fails."""
        command = [f"{sys.prefix}/bin/ray", verb, *OPTIONS[verb], str(self.file), *words]
        env = {**os.environ, "RAY_TMPDIR": str(self.network.folder)}  # the folder for its state
        with (self.network.folder / f"ray-{verb}.log").open("w+") as log:
            done = subprocess.run(command, env=env, stdout=log, stderr=log, timeout=START_S)
            log.seek(0)
            output = log.read()
        assert done.returncode == 0, output[-4000:]
        return output

    def worker(self, address: str) -> Host:
        return next(host for host in self.workers if host.address == address)


@contextmanager
def ray_up(*, workers: int, args: Mapping[str, Any], gpus: int = GPUS) -> Iterator[Nodes]:
    """Run the application that kvroute ships on a head and workers, and remove them at the end.

    Args:
        workers: The number of workers.
        args: Arguments of the application.
        gpus: The number of GPUs that each worker reports. Each replica takes one.
    """
    resolve(BUILTIN_MODEL)
    environment = {
        "PYTHONPATH": f"{HOME}/kvroute",
        "XDG_CACHE_HOME": str(folder().parent.parent),  # the model's folder, which all hosts share
    }
    with network(environment) as made:
        hosts = [made.add(f"worker{number}") for number in range(workers)]
        nodes = Nodes(made, made.add("head"), tuple(hosts), made.folder / "cluster.yaml")
        nodes.file.write_text(yaml.safe_dump(_cluster(nodes, _checkout(made.folder, args), gpus)))
        nodes.ray("up")
        _wait_until_ready(nodes, args["replicas"])
        yield nodes


def _checkout(folder: Path, args: Mapping[str, Any]) -> Path:
    """Copy the shipped folders, with the test's arguments of the application."""
    checkout = folder / "checkout"
    for name in SHIPPED:
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    file = checkout / "deploy" / "serve.yaml"
    config = yaml.safe_load(file.read_text())
    config["applications"][0]["args"] |= {"model": BUILTIN_MODEL, **args}
    file.write_text(yaml.safe_dump(config))
    return checkout


def _cluster(nodes: Nodes, checkout: Path, gpus: int) -> dict[str, Any]:
    """Return the shipped configuration for these hosts. They have kvroute's packages already."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "on-premises.yaml").read_text())
    addresses = [host.address for host in nodes.workers]
    config["cluster_name"] = nodes.network.bridge
    config["provider"] |= {"head_ip": nodes.head.address, "worker_ips": addresses}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(nodes.network.key)}
    token = nodes.network.folder / "token"
    token.write_text(TOKEN)
    config["file_mounts"] = {"~/kvroute": str(checkout), "~/.ray/auth_token": str(token)}
    config["setup_commands"] = [f"ln -sfn {sys.prefix} ~/kvroute/.venv"]
    (start,) = config["worker_start_ray_commands"]
    config["worker_start_ray_commands"] = [f"{start} --num-gpus={gpus}"]
    return config


def _wait_until_ready(nodes: Nodes, replicas: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if len(nodes.index()) == replicas and nodes.index() == nodes.serving():
                return
        except (httpx.HTTPError, subprocess.CalledProcessError, KeyError):
            nodes.check_deployed()  # Serve is not up yet
        time.sleep(0.5)
    raise AssertionError(f"not ready in time: {nodes.index()}")
