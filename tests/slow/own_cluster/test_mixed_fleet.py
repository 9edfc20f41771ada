"""A fleet of one attached vLLM server and one replica that kvroute starts itself."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from tests.support.adapters import write_adapter
from tests.support.attached import BLOCK, NAME, attachable_servers
from tests.support.serving import START_S, Cluster, doctor, start_cluster
from tests.support.waiting import wait_until

TIMEOUT_S = 300.0  # a long prompt takes many seconds on a busy CPU
DOCUMENTS, QUESTIONS = 6, 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("attached")
    adapter = f"sql={write_adapter(folder / 'sql', seed=1)}"
    lora = ["--enable-lora", "--lora-modules", adapter, "--max-lora-rank", "8"]
    model = Path(resolve(BUILTIN_MODEL))
    with attachable_servers(model, folder, count=1, options=lora) as (server,):
        options = ["--attach", server.url, "--own-replicas", "1", "--lora", adapter]
        options += ["--dtype", "float32", "--max-model-len", "2048", "--block-size", str(BLOCK)]
        with start_cluster(*options) as running:
            yield running


def ask(cluster: Cluster, prompt: str, model: str = NAME) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    response.raise_for_status()
    return response


def document(number: int) -> str:
    return " ".join(map(str, Random(number).choices(range(10_000), k=150)))


def replicas(cluster: Cluster) -> dict[bool, dict[str, Any]]:
    """Return the attached replica (True) and kvroute's own (False)."""
    state = httpx.get(f"{cluster.url}/v1/cluster", timeout=30).json()
    return {bool(replica.get("server")): replica for replica in state["replicas"]}


def test_both_kinds_answer_equally_and_hits_are_found_in_either(cluster: Cluster) -> None:
    used, misses = set[str](), []
    order = [number for number in range(DOCUMENTS) for _ in range(QUESTIONS)]
    Random(1).shuffle(order)
    texts: dict[str, set[str]] = {}
    seen = set[int]()
    for number in order:
        response = ask(cluster, document(number))
        cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert int(response.headers["x-kvroute-expected-tokens"]) == cached
        if number in seen and not cached:
            misses.append(number)
        seen.add(number)
        used.add(response.headers["x-kvroute-replica"])
        texts.setdefault(document(number), set()).add(response.json()["choices"][0]["text"])
    assert len(misses) == len({*misses})  # at most one computation of a document at each replica
    assert used == {replica["id"] for replica in replicas(cluster).values()}
    assert {len(answers) for answers in texts.values()} == {1}


def test_an_adapter_has_answers_and_blocks_of_its_own(cluster: Cluster) -> None:
    base, texts = ask(cluster, document(100)), set[str]()
    for number in range(8):
        response = ask(cluster, document(100), "sql")
        cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert int(response.headers["x-kvroute-expected-tokens"]) == cached
        assert bool(cached) == (number > 0)
        texts.add(response.json()["choices"][0]["text"])
    assert len(texts) == 1
    assert texts != {base.json()["choices"][0]["text"]}


def test_the_doctor_finds_nothing(cluster: Cluster) -> None:
    finished = doctor(cluster)
    assert finished.returncode == 0, finished.stdout


def test_the_attached_server_answers_while_the_own_replica_is_down(cluster: Cluster) -> None:
    own, attached = replicas(cluster)[False], replicas(cluster)[True]
    os.kill(own["pid"], signal.SIGKILL)
    for number in range(4):
        response = ask(cluster, document(50 + number))
        assert response.headers["x-kvroute-replica"] == attached["id"]
    wait_until(lambda: False in replicas(cluster), within_s=START_S)
