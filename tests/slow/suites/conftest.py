"""What the suites share: a kvroute cluster and vLLM's own server, with the same small model."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.bench.stock_server import stock_server
from tests.bench.stream.mock_engine import HOST
from tests.support.engines import TOOL_PARSER, terse_model
from tests.support.serving import Cluster
from tests.support.shared import shared_cluster, stacks
from tests.support.suites import Servers

# An answer ends after this many tokens, since the model seldom ends it by itself.
MAX_TOKENS = json.dumps({"max_new_tokens": 100})
MAX_MODEL_LEN = "8192"  # the largest context that a test of the suites needs


@pytest.fixture(scope="session")
def suite_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the model that both servers have."""
    return terse_model(tmp_path_factory.mktemp("suites") / "model")


@pytest.fixture(scope="session")
def suite_cluster(suite_model: Path) -> Iterator[Cluster]:
    """Two vLLM replicas behind two routers, with the options that the suites need."""
    yield from shared_cluster(
        "suite_cluster",
        *("--model", str(suite_model), "--served-model-name", BUILTIN_MODEL, "--routers", "2"),
        *("--dtype", "float32", "--kv-cache-memory-mb", "256", "--max-model-len", MAX_MODEL_LEN),
        *("--response-store-mb", "16", "--engine-arg", f"tool_call_parser={TOOL_PARSER}"),
        *("--engine-arg", f"override_generation_config={MAX_TOKENS}"),
    )


@pytest.fixture(scope="session")
def stock_url(suite_model: Path) -> Iterator[str]:
    """Start vLLM's own server with the options of the cluster; return its address."""
    with stacks["stock_url"] as stack:
        port, _ = stack.enter_context(
            stock_server(
                *(str(suite_model), "--dtype", "float32", "--max-model-len", MAX_MODEL_LEN),
                *("--enable-auto-tool-choice", "--tool-call-parser", TOOL_PARSER),
                *("--override-generation-config", MAX_TOKENS),
                name=BUILTIN_MODEL,
                cache_mb=256,
                env={"VLLM_ENABLE_RESPONSES_API_STORE": "1"},
            )
        )
        yield f"http://{HOST}:{port}"


@pytest.fixture(scope="session")
def servers(suite_cluster: Cluster, stock_url: str) -> Servers:
    """Return the addresses of both servers."""
    return Servers(kvroute=suite_cluster.url, stock=stock_url)
