"""vLLM servers that keep evicted blocks in host memory, behind `kvroute attach`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from tests.support.attached import BLOCK, BLOCKS, NAME, AttachableServer, attachable_servers
from tests.support.serving import ATTACH, Cluster, start_cluster
from tests.support.waiting import wait_until

HOST_BYTES = 1_000_000_000  # several times what the KV cache can hold, 1.5 MB a block
# vLLM's own connector, policy and events. Only the copies are kvroute's: vLLM's need a GPU.
CONNECTOR = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostTierSpec",
        "spec_module_path": "kvroute.replica.vllm_engine.host.copies",
        "cpu_bytes_to_use": HOST_BYTES,
    },
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[AttachableServer]]:
    options = ("--kv-transfer-config", json.dumps(CONNECTOR))
    folder = tmp_path_factory.mktemp("servers")
    with attachable_servers(Path(resolve(BUILTIN_MODEL)), folder, options=options) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(servers: list[AttachableServer]) -> Iterator[Cluster]:
    with start_cluster(*(server.url for server in servers), command=ATTACH) as running:
        yield running


def prompt(number: int, *, blocks: int = 30) -> dict[str, Any]:
    """Return a request whose prompt has this many blocks and differs in its first token."""
    ids = [1000 + number, *range(100, 100 + blocks * BLOCK - 1)]
    return {"model": NAME, "prompt": ids, "max_tokens": 1, "temperature": 0}


def answered(url: str, body: dict[str, Any]) -> httpx.Response:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    answer.raise_for_status()
    return answer


def cached_tokens(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def replicas(gateway: Cluster, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the router knows about each server for a prompt, the chosen one first."""
    answer = httpx.post(f"{gateway.url}/v1/route", json=body, timeout=60)
    answer.raise_for_status()
    [receipt] = answer.json()["receipts"]
    return list(receipt["replicas"])


def evict(url: str, *, first: int) -> None:
    """Fill a server's KV cache with other prompts."""
    for number in range(first, first + BLOCKS // 30 + 1):
        answered(url, prompt(number))


def test_what_is_left_in_host_memory_counts_and_is_reused(
    gateway: Cluster, servers: list[AttachableServer]
) -> None:
    server = servers[0]
    answered(server.url, prompt(0))
    evict(server.url, first=10)
    assert cached_tokens(answered(server.url, prompt(0))) > 0  # the copy that is measured
    evict(server.url, first=20)

    def in_host_memory() -> bool:
        chosen = replicas(gateway, prompt(0))[0]
        return 0 < int(chosen["hit_tokens"]) == int(chosen.get("host_tokens", 0))

    wait_until(in_host_memory)
    answer = answered(gateway.url, prompt(0))
    expected = int(answer.headers["x-kvroute-expected-tokens"])
    assert expected > 0
    assert expected <= cached_tokens(answer) <= expected + BLOCK  # a copy may end with the prompt
