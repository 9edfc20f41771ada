"""The vLLM cluster that the tests of this folder share."""

import json
from collections.abc import Iterator

import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.engines import TOOL_PARSER, terse_model
from tests.support.serving import COMMAND, Cluster
from tests.support.shared import shared_cluster
from tests.support.workloads import TASKS


@pytest.fixture(scope="session")
def vllm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two vLLM replicas of a model with two layers, behind two routers, with a file of prefixes.

    Tests compare answers: in float32 a cached and a computed prompt have the same one. The engines
    take all cores that they get, so the tests beside them come first.
    """
    model = str(terse_model(tmp_path_factory.mktemp("vllm") / "model"))
    yield from shared_cluster(
        "vllm_cluster",
        *("--model", model, "--served-model-name", BUILTIN_MODEL, "--routers", "2"),
        *("--dtype", "float32", "--kv-cache-memory-mb", "256", "--max-model-len", "4096"),
        *("--response-store-mb", "16", "--engine-arg", f"tool_call_parser={TOOL_PARSER}"),
        env={"MULTI_TASK_PROMPT_STR": json.dumps(TASKS)},
        deadline_s=400,
        command=("nice", "-n", "10", *COMMAND),
    )


@pytest.fixture
def cluster(vllm_cluster: Cluster) -> Cluster:
    """Return the cluster that the tests of this folder talk to."""
    return vllm_cluster
