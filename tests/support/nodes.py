"""A cluster on several hosts for a test: `ray up deploy/on-premises.yaml`, as a user runs it."""

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
SHIPPED = ("kvroute", "deploy")  # what a host needs of the checkout
REPLICA_PROCESS = "ray::ServeRepli"  # Linux cuts names there
GPUS = 2  # that each worker says it has; simulated engines need none
START_S = 480.0
TOKEN = secrets.token_hex(32)  # Ray's
OBSTACLE = why_not()
ON_NODES = (  # marks of tests that want them
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
    file: Path  # that `ray up` was given

    @property
    def hosts(self) -> tuple[Host, ...]:
        return (self.head, *self.workers)

    @property
    def url(self) -> str:
        return f"http://{self.head.address}:8000"

    def index(self) -> dict[str, str]:
        """The address of each replica in Redis, by id."""
        answer = httpx.get(f"{self.url}/v1/cluster", timeout=10).raise_for_status()
        return {each["id"]: each["node"] for each in answer.json()["replicas"]}

    def serving(self) -> dict[str, str]:
        """The address of each replica that Serve sends requests to, by id."""
        api = "http://127.0.0.1:8265/api/serve/applications/"  # the head's own
        inside = ("nsenter", "--net", "--target", str(self.head.init.pid))
        key = ("--header", f"Authorization: Bearer {TOKEN}")
        curl = ("curl", "--silent", "--fail", "--max-time", "10", *key, api)
        said = subprocess.run([*inside, *curl], check=True, capture_output=True).stdout
        replicas = json.loads(said)["applications"]["kvroute"]["deployments"]["Replica"]["replicas"]
        return {
            replica["replica_id"]: replica["node_ip"]
            for replica in replicas
            if replica["state"] == "RUNNING"
        }

    def processes(self) -> Counter[str]:
        """How many replicas run at each address, whoever may know of them."""
        return Counter(
            host.address
            for host in self.workers
            for process in host.processes()
            if process.name().startswith(REPLICA_PROCESS)
        )

    def views(self) -> tuple[dict[str, str], dict[str, str], Counter[str]]:
        """What the index, Serve and the hosts themselves say about replicas."""
        return self.index(), self.serving(), self.processes()

    def ray(self, verb: str, *words: str) -> str:
        """What `ray up`, `ray down` or `ray exec` prints. Fails with it."""
        command = [f"{sys.prefix}/bin/ray", verb, *OPTIONS[verb], str(self.file), *words]
        env = {**os.environ, "RAY_TMPDIR": str(self.network.folder)}  # where it keeps its notes
        with (self.network.folder / f"ray-{verb}.log").open("w+") as log:
            done = subprocess.run(command, env=env, stdout=log, stderr=log, timeout=START_S)
            log.seek(0)
            said = log.read()
        assert done.returncode == 0, said[-4000:]
        return said

    def worker(self, address: str) -> Host:
        return next(host for host in self.workers if host.address == address)


@contextmanager
def ray_up(*, workers: int, args: Mapping[str, Any], gpus: int = GPUS) -> Iterator[Nodes]:
    """The shipped application with these args, on a head and workers; all is gone afterwards.

    gpus: that each worker says it has; each replica takes one.
    """
    resolve(BUILTIN_MODEL)
    environment = {
        "PYTHONPATH": f"{HOME}/kvroute",
        "XDG_CACHE_HOME": str(folder().parent.parent),  # the model, made once for all hosts
    }
    with network(environment) as made:
        hosts = [made.add(f"worker{number}") for number in range(workers)]
        nodes = Nodes(made, made.add("head"), tuple(hosts), made.folder / "cluster.yaml")
        nodes.file.write_text(yaml.safe_dump(_cluster(nodes, _checkout(made.folder, args), gpus)))
        nodes.ray("up")
        _wait_until_ready(nodes, args["replicas"])
        yield nodes


def _checkout(folder: Path, args: Mapping[str, Any]) -> Path:
    """What is shipped, with args of the test's."""
    checkout = folder / "checkout"
    for name in SHIPPED:
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    file = checkout / "deploy" / "serve.yaml"
    config = yaml.safe_load(file.read_text())
    config["applications"][0]["args"] |= {"model": BUILTIN_MODEL, **args}
    file.write_text(yaml.safe_dump(config))
    return checkout


def _cluster(nodes: Nodes, checkout: Path, gpus: int) -> dict[str, Any]:
    """The shipped file for these hosts, which have our packages already."""
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
            pass  # Serve is not up yet
        time.sleep(0.5)
    raise AssertionError(f"not ready in time: {nodes.index()}")
