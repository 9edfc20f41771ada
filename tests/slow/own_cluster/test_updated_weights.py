"""Weights that operators update while a cluster answers requests."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.engines import shallow_model
from tests.support.serving import KVROUTE, Cluster, start_cluster
from tests.support.waiting import wait_until
from tests.support.weights import empty_weights, random_weights

TIMEOUT_S = 200.0
PROMPTS = [f"question {number}: " + "word " * 40 * (1 + number % 4) for number in range(12)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    for name in ("step-1", "step-2", "cut"):
        empty_weights(root / name)
    (root / "cut" / "model.safetensors").write_bytes(b"no weights")
    return root


@pytest.fixture(scope="module")
def simulated(root: Path) -> Iterator[Cluster]:
    options = ("--replicas", "3", "--routers", "2", "--simulated-decode-ms", "20")
    with start_cluster("--engine", "simulated", *options, "--weights-root", str(root)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def vllm(root: Path) -> Iterator[Cluster]:
    model = shallow_model(root / "model")
    random_weights(model, root / "other", seed=1)
    options = ("--model", str(model), "--served-model-name", BUILTIN_MODEL, "--replicas", "1")
    exact = ("--dtype", "float32", "--kv-cache-memory-mb", "64", "--max-model-len", "1024")
    with start_cluster(*options, *exact, "--weights-root", str(root), deadline_s=400) as cluster:
        yield cluster


def update(cluster: Cluster, source: str, **more: Any) -> httpx.Response:
    body = {"source": source, **more}
    return httpx.post(f"{cluster.url}/v1/weights", json=body, timeout=TIMEOUT_S)


def state(cluster: Cluster) -> dict[str, Any]:
    data = httpx.get(f"{cluster.url}/v1/weights", timeout=TIMEOUT_S).json()["data"]
    return dict(data[0])


def versions(cluster: Cluster) -> list[str | None]:
    return [replica["version"] for replica in state(cluster)["replicas"]]


def ask(cluster: Cluster, prompt: str, **more: Any) -> httpx.Response:
    body = {"model": BUILTIN_MODEL, "prompt": prompt, "max_tokens": 40, "temperature": 0, **more}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=TIMEOUT_S)


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def streamed_text(cluster: Cluster, prompt: str) -> str:
    """Return the text of a stream, or its error."""
    body = {"model": BUILTIN_MODEL, "prompt": prompt, "max_tokens": 40, "temperature": 0}
    url, parts = f"{cluster.url}/v1/completions", []
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=TIMEOUT_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = httpx.Response(200, text=line[6:]).json()
                parts.append(
                    event["choices"][0]["text"] if "choices" in event else f"lost: {event}"
                )
    return "".join(parts)


def cached_tokens(response: httpx.Response) -> int:
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def texts(cluster: Cluster) -> dict[str, str]:
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda prompt: text(ask(cluster, prompt)), PROMPTS)
        return dict(zip(PROMPTS, answers, strict=True))


def test_an_update_under_load_loses_no_request_and_mixes_no_weights_if_a_replica_is_killed(
    simulated: Cluster,
) -> None:
    before, ends = texts(simulated), threading.Event()
    answers: list[tuple[str, str]] = []

    def keep_asking(number: int) -> None:
        n = number
        while not ends.is_set():
            prompt = PROMPTS[n % len(PROMPTS)]
            if n % 2:
                answers.append((prompt, streamed_text(simulated, prompt)))
            else:
                response = ask(simulated, prompt)
                lost = f"{response.status_code}: {response.text}"
                answers.append((prompt, text(response) if response.is_success else lost))
            n += 1

    threads = [threading.Thread(target=keep_asking, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(answers) > 10)
        with ThreadPoolExecutor(1) as pool:
            updating = pool.submit(update, simulated, "step-1")
            wait_until(lambda: None in versions(simulated))
            replicas = httpx.get(f"{simulated.url}/v1/cluster").json()["replicas"]
            os.kill(replicas[0]["pid"], signal.SIGKILL)
            assert updating.result().status_code in (200, 202)
        wait_until(lambda: versions(simulated) == ["step-1"] * 3, within_s=120)
        reached = len(answers)
        wait_until(lambda: len(answers) > reached + 10)
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    after = texts(simulated)
    wrong = [each for each in answers if each[1] not in (before[each[0]], after[each[0]])]
    assert wrong == []
    assert {before[prompt] == answer for prompt, answer in answers} == {True, False}
    assert all(before[prompt] != after[prompt] for prompt in PROMPTS)


def test_the_cache_has_nothing_after_an_update_and_hits_later(simulated: Cluster) -> None:
    prompt = "again " * 200
    ask(simulated, prompt)
    assert cached_tokens(ask(simulated, prompt)) > 0
    assert update(simulated, "step-2", at_once=3).status_code == 200
    assert cached_tokens(ask(simulated, prompt)) == 0
    again = ask(simulated, prompt)
    assert cached_tokens(again) > 0
    assert again.headers["x-kvroute-expected-tokens"] == str(cached_tokens(again))
    drift = [
        replica["drift"]
        for replica in httpx.get(f"{simulated.url}/v1/cluster/audit").json()["replicas"]
    ]
    assert not any(count for counts in drift for count in counts.values())


def test_weights_that_cannot_be_loaded_change_nothing(simulated: Cluster) -> None:
    before = state(simulated)["version"]
    refused = update(simulated, "cut")
    assert refused.status_code == 400
    assert "is not a safetensors file" in refused.json()["error"]["message"]
    assert versions(simulated) == [before] * 3


def command(cluster: Cluster, *words: str) -> "subprocess.CompletedProcess[str]":
    line = [*KVROUTE, "weights", *words, "--url", cluster.url]
    return subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_the_command_updates_all_replicas_shows_them_and_fails_with_the_reason(
    simulated: Cluster,
) -> None:
    updated = command(simulated, "update", "step-1", "--version", "by-hand")
    assert updated.returncode == 0, updated.stderr
    assert updated.stdout.endswith("by-hand: loaded by 3 replicas\n")
    shown = command(simulated, "show").stdout
    assert "ready: loaded by 3 of 3 replicas" in shown
    assert shown.count("has them") == 3
    refused = command(simulated, "update", "cut")
    assert (refused.returncode, "is not a safetensors file" in refused.stderr) == (1, True)
    begun = command(simulated, "update", "step-2", "--no-wait")
    assert begun.stdout.endswith("the update has begun; kvroute weights show says how far it is\n")
    wait_until(lambda: versions(simulated) == ["step-2"] * 3)


def test_the_command_names_the_replica_that_cannot_load_the_weights(
    simulated: Cluster, root: Path
) -> None:
    folder = empty_weights(root / "lost")
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(command, simulated, "update", "lost")
        wait_until(lambda: "lost" in versions(simulated))
        folder.rename(root / "moved")
        ended = updating.result()
    assert ended.returncode == 1, ended.stdout
    assert "lost is not a folder" in ended.stderr
    (behind,) = (each for each in state(simulated)["replicas"] if each["problem"])
    assert f"replica {behind['id']} cannot load it, and tries again" in ended.stderr
    assert "cannot load lost, and tries again" in command(simulated, "show").stdout
    (root / "moved").rename(folder)
    wait_until(lambda: versions(simulated) == ["lost"] * 3)


def test_vllm_answers_as_with_a_fresh_start_and_starts_again_with_the_new_weights(
    vllm: Cluster, root: Path
) -> None:
    prompt = " ".join(map(str, range(150)))
    before = text(ask(vllm, prompt))
    assert cached_tokens(ask(vllm, prompt)) > 0
    refused = update(vllm, "step-1")
    assert "lacks" in refused.json()["error"]["message"]
    assert text(ask(vllm, prompt)) == before
    assert update(vllm, "other", version="v2").status_code == 200
    first = ask(vllm, prompt)
    assert (cached_tokens(first), text(first) == before) == (0, False)
    assert cached_tokens(again := ask(vllm, prompt)) > 0
    assert text(again) == text(first)
    (killed,) = state(vllm)["replicas"]
    for victim in vllm.titled("kvroute:Replica"):
        psutil.Process(victim.pid).kill()

    def has_another_replica() -> bool:
        now = state(vllm)
        ids = [replica["id"] for replica in now["replicas"]]
        return now["state"] == "ready" and bool(ids) and killed["id"] not in ids

    wait_until(has_another_replica, within_s=200)
    assert versions(vllm) == ["v2"]
    assert text(ask(vllm, prompt)) == text(first)
    back = update(vllm, "model")
    assert back.status_code == 200, back.text
    assert text(ask(vllm, prompt)) == before
