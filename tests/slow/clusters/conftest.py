"""Simulated clusters that several modules of tests share. A start takes 12 to 27 CPU seconds: each
cluster starts when the first test asks for it, and ends after the last one. Their tests assert
differences, not totals."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvroute.local.ports import free_port
from tests.support.adapters import write_adapter
from tests.support.model_files import copy_model_files
from tests.support.redis_server import Wire, Wired, redis_server
from tests.support.serving import READY, Cluster, launched, start_cluster
from tests.support.shared import shared_cluster, stacks
from tests.support.workloads import ADAPTERS, TASKS


def _start(name: str, *args: str, **env: str) -> Iterator[Cluster]:
    """Start simulated replicas that tests share until the last test that asks for them."""
    return shared_cluster(name, "--engine", "simulated", *args, env=env)


def _start_to_lose(name: str, *args: str, **env: str) -> Iterator[Cluster]:
    """Start a cluster that its last test may stop or kill."""
    with stacks[name] as stack:
        cluster = stack.enter_context(launched("--engine", "simulated", *args, env=env))
        cluster.wait_for(READY)
        yield cluster


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with those of `named`, and its request log."""
    folder = tmp_path_factory.mktemp("lora")
    for name in ADAPTERS:
        write_adapter(folder / name, seed=1)
    return folder


@pytest.fixture(scope="session")
def named(tmp_path_factory: pytest.TempPathFactory, adapters: Path) -> Iterator[Cluster]:
    """Three replicas behind two routers, with a file of tasks, and adapters of which each replica
    can keep one."""
    file = tmp_path_factory.mktemp("tasks") / "tasks.json"
    file.write_text(json.dumps(TASKS))
    sql, law = (f"{name}={adapters / name}" for name in ADAPTERS)
    yield from _start(
        "named",
        *("--replicas", "3", "--routers", "2"),
        *("--simulated-decode-ms", "5", "--max-model-len", "8192"),
        *("--simulated-prefill-tokens-per-s", "10000"),  # a dozen clients are a crowd
        *("--lora", sql, "--lora-modules", law, "--max-loras", "1", "--max-cpu-loras", "1"),
        *("--request-log", str(adapters / "log")),
        MULTI_TASK_PROMPT=str(file),
    )


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model that `slow` serves."""
    return copy_model_files(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def slow(slow_model: Path) -> Iterator[Cluster]:
    """One replica of known speed, beside which the machine's own hardly counts. It serves a model
    from a folder of its own."""
    yield from _start(
        "slow",
        *("--model", str(slow_model), "--served-model-name", "m", "--replicas", "1"),
        *("--max-model-len", "2048"),
        *("--simulated-prefill-tokens-per-s", "2000", "--simulated-decode-ms", "40"),
    )


@pytest.fixture(scope="session")
def plain() -> Iterator[Cluster]:
    """Two replicas without all that can be switched off. Its last test may stop it."""
    options = ("--no-ui", "--no-metrics", "--replicas", "2", "--simulated-decode-ms", "30")
    env = {"REUSE_CACHE": "0", "SEQ_SIZE_PER_BLOCK": "64"}
    yield from _start_to_lose("plain", *options, **env)


@pytest.fixture(scope="session")
def wired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wired]:
    """Three replicas with small caches behind two routers."""
    port, folder = free_port(), tmp_path_factory.mktemp("redis")
    with stacks["wired"] as stack:
        server = stack.enter_context(ExitStack())
        server.enter_context(redis_server(port, folder))
        wire = stack.enter_context(Wire(free_port(), port).running())
        options = ("--replicas", "3", "--routers", "2", "--simulated-decode-ms", "5")
        small = ("--simulated-blocks", "1200", "--max-model-len", "4096")
        cluster = stack.enter_context(
            start_cluster("--engine", "simulated", *options, *small, "--redis-url", wire.url)
        )
        yield Wired(cluster, wire, server, port, folder)


@pytest.fixture(scope="session")
def node_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The request log of `node`."""
    return tmp_path_factory.mktemp("node")


@pytest.fixture(scope="session")
def node(node_log: Path) -> Iterator[Cluster]:
    """Two replicas in turn, behind two routers. Its last test may kill it."""
    yield from _start_to_lose(
        "node",
        *("--replicas", "2", "--routers", "2", "--simulated-decode-ms", "30"),
        *("--policy", "round-robin", "--request-log", str(node_log)),
    )


@pytest.fixture(scope="session")
def pair() -> Iterator[Cluster]:
    """Two replicas behind one router."""
    yield from _start("pair", "--simulated-decode-ms", "1")


@pytest.fixture(scope="session")
def trio() -> Iterator[Cluster]:
    """Three replicas behind two routers, which answer so slowly that much can happen meanwhile."""
    yield from _start(
        "trio",
        *("--replicas", "3", "--routers", "2", "--simulated-decode-ms", "30"),
        *("--drain-timeout-s", "8"),
    )
