"""LoRA adapters that operators add and remove while a cluster answers requests."""

import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvroute.local.running import KEY
from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.adapters import write_adapter
from tests.support.engines import LAYERS, WIDTH, shallow_model
from tests.support.serving import KVROUTE, Cluster, start_cluster
from tests.support.waiting import wait_until
from tests.support.whole_fleet import wait_for_fleet

ROUNDS = 6  # adapters that are added and removed under load
NAMES = ("sql", "law", "poems", "broken")
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of adapters, all of them different, and one broken."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate((*NAMES, *map(str, range(ROUNDS)))):
        write_adapter(root / name, seed=seed, layers=LAYERS, width=WIDTH, strength=4.0)
    (root / "broken" / "adapter_model.safetensors").write_bytes(b"no weights")
    return root


@pytest.fixture(scope="module")
def simulated(root: Path) -> Iterator[Cluster]:
    options = ("--replicas", "3", "--routers", "2", "--simulated-decode-ms", "20")
    memory = ("--max-loras", "1", "--max-cpu-loras", "2", "--lora-root", str(root))
    with start_cluster("--engine", "simulated", *options, *memory) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def vllm(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = str(shallow_model(tmp_path_factory.mktemp("model") / "model"))
    options = ("--model", model, "--served-model-name", BUILTIN_MODEL, "--replicas", "2")
    exact = ("--dtype", "float32", "--kv-cache-memory-mb", "64", "--max-model-len", "1024")
    memory = ("--max-loras", "1", "--max-cpu-loras", "2", "--lora-root", str(root))
    with start_cluster(*options, *exact, *memory) as cluster:
        yield cluster


def adapters(cluster: Cluster, *args: str, key: str = "") -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, KEY: key}
    command = [*KVROUTE, "adapters", *args, "--url", cluster.url]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)


def added(cluster: Cluster, *args: str, key: str = "") -> None:
    result = adapters(cluster, "add", *args, key=key)
    assert result.returncode == 0, result.stderr


def removed(cluster: Cluster, name: str) -> None:
    result = adapters(cluster, "remove", name)
    assert (result.returncode, result.stdout.strip()) == (0, f"{name}: removed"), result.stderr


def ask(cluster: Cluster, model: str, prompt: str = "one two three", **body: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, **body}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=TIMEOUT_S)


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def listed(cluster: Cluster) -> dict[str, dict[str, Any]]:
    data = httpx.get(f"{cluster.url}/v1/adapters", timeout=TIMEOUT_S).json()["data"]
    return {adapter["name"]: adapter for adapter in data}


def loaded(cluster: Cluster, name: str) -> int:
    adapter = listed(cluster).get(name)
    return len(adapter["loaded_on"]) if adapter else 0


def test_an_added_adapter_is_a_model_at_every_router_and_gone_after_its_removal(
    simulated: Cluster,
) -> None:
    added(simulated, "sql", "sql")
    for _ in range(6):  # of both routers
        response = ask(simulated, "sql")
        assert (response.status_code, response.json()["model"]) == (200, "sql")
        assert ask(simulated, f"{BUILTIN_MODEL}:sql").status_code == 200
    cards = httpx.get(f"{simulated.url}/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        (BUILTIN_MODEL, None),
        ("sql", BUILTIN_MODEL),
    ]
    removed(simulated, "sql")
    assert {ask(simulated, "sql").status_code for _ in range(6)} == {404}
    wait_until(lambda: not loaded(simulated, "sql"))


def test_requests_go_to_the_replica_that_has_the_adapter(simulated: Cluster) -> None:
    added(simulated, "law", "law")
    used = {ask(simulated, "law", f"question {n}").headers["x-kvroute-replica"] for n in range(6)}
    assert len(used) == 1
    removed(simulated, "law")


def test_a_warm_adapter_is_loaded_everywhere_without_a_request(simulated: Cluster) -> None:
    added(simulated, "poems", "poems", "--warm")
    wait_until(lambda: loaded(simulated, "poems") == 3)  # another router hears of it later
    removed(simulated, "poems")


@pytest.mark.parametrize(
    ("name", "folder", "message"),
    [
        ("broken", "broken", "is not a safetensors file"),
        ("gone", "gone", "cannot be read on the replica's machine"),
        ("out", "/etc", "it is not in"),
        ("out", "../..", "it is not in"),
        ("a:b", "sql", "lora_name is"),
        (BUILTIN_MODEL, "sql", "choose another name"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_refused_with_the_reason(
    simulated: Cluster, name: str, folder: str, message: str
) -> None:
    body = {"lora_name": name, "lora_path": folder}
    response = httpx.post(f"{simulated.url}/v1/load_lora_adapter", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert ask(simulated, name if ":" in name else "out").status_code == 404


def test_a_removal_waits_for_a_running_answer(simulated: Cluster) -> None:
    added(simulated, "sql", "sql")
    body = {"model": "sql", "prompt": "count", "max_tokens": 400, "stream": True}
    url = f"{simulated.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        with ThreadPoolExecutor(1) as pool:
            removal = pool.submit(
                httpx.post,
                f"{simulated.url}/v1/unload_lora_adapter",
                json={"lora_name": "sql"},
                timeout=TIMEOUT_S,
            )
            wait_until(lambda: listed(simulated)["sql"]["state"] == "leaving")
            assert not removal.done()
            assert "data: [DONE]" in list(lines)
            assert removal.result().status_code == 200
    assert listed(simulated) == {}


@contextmanager
def asking(cluster: Cluster, names: set[str]) -> Iterator[Counter[str]]:
    """Keep asking for the adapters in `names`; count the answers and the errors."""
    outcomes, ends = Counter[str](), threading.Event()

    def keep_asking(number: int) -> None:
        n = 0
        while not ends.is_set():
            for name in [*names]:
                n += 1
                try:
                    response = ask(cluster, name, f"client {number}, question {n}")
                except httpx.HTTPError as error:
                    outcomes[f"lost: {error!r}"] += 1
                    continue
                if response.status_code == 200:
                    assert response.json()["model"] == name
                    outcomes["ok"] += 1
                elif name in names:  # it was not being removed when the answer came
                    outcomes[f"{response.status_code}: {response.text}"] += 1

    threads = [threading.Thread(target=keep_asking, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield outcomes
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def test_adapters_come_and_go_under_load_while_a_router_and_a_replica_are_killed(
    simulated: Cluster,
) -> None:
    wait_for_fleet(simulated)
    names: set[str] = set()
    with asking(simulated, names) as outcomes:
        for number in range(ROUNDS):
            name = str(number)
            added(simulated, name, name)
            names.add(name)
            before = outcomes["ok"]
            wait_until(lambda before=before: outcomes["ok"] > before + 10)  # type: ignore[misc]
            if number == 1:
                simulated.routers()[0].kill()
            if number == 3:
                victims = simulated.titled("kvroute:Replica")
                os.kill(victims[0].pid, signal.SIGKILL)
            if number % 2:
                names.discard(name)
                removed(simulated, name)
                assert ask(simulated, name).status_code == 404
        assert set(listed(simulated)) == names
        names.clear()
    # A request whose own router is killed is lost with its connection; all others are answered.
    refused = {outcome: n for outcome, n in outcomes.items() if outcome[:2] not in ("ok", "lo")}
    assert not {outcome for outcome in refused if not outcome.startswith(("502", "503"))}, refused
    wait_for_fleet(simulated)
    for name in [*listed(simulated)]:
        removed(simulated, name)


def test_added_weights_change_answers_and_replaced_ones_are_never_mixed_up(
    vllm: Cluster,
) -> None:
    prompt = " ".join(str(n) for n in range(150))
    base = text(ask(vllm, BUILTIN_MODEL, prompt))
    added(vllm, "style", "sql")
    sql = text(ask(vllm, "style", prompt))
    assert text(ask(vllm, "style", prompt)) == sql != base
    added(vllm, "style", "law", "--replace")
    law = ask(vllm, "style", prompt)
    assert text(law) not in (sql, base)
    assert law.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    wait_until(lambda: len(listed(vllm)) == 1)
    added(vllm, "style", "sql", "--replace")
    assert text(ask(vllm, "style", prompt)) == sql
    assert text(ask(vllm, BUILTIN_MODEL, prompt)) == base
    removed(vllm, "style")
    assert ask(vllm, "style", prompt).status_code == 404


def test_vllms_reason_why_an_adapter_is_broken_reaches_the_operator(
    vllm: Cluster, root: Path
) -> None:
    write_adapter(root / "wide", seed=1, layers=LAYERS, width=2 * WIDTH)
    result = adapters(vllm, "add", "wide", "wide")
    assert result.returncode == 1
    assert "cannot be loaded from" in result.stderr
    assert text(ask(vllm, BUILTIN_MODEL))
    assert listed(vllm) == {}


def test_more_adapters_than_fit_into_memory_are_all_answered(vllm: Cluster) -> None:
    for number in range(4):
        added(vllm, str(number), str(number))
    answers = {str(n): text(ask(vllm, str(n), "a b c d e f")) for n in range(4)}
    for name, answer in answers.items():
        assert text(ask(vllm, name, "a b c d e f")) == answer
    for name in answers:
        removed(vllm, name)


def test_a_chat_and_its_template_work_with_an_adapter(vllm: Cluster) -> None:
    added(vllm, "poems", "poems", "--warm")
    body = {
        "model": "poems",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
        "logprobs": True,
    }
    for path, more in (("chat/completions", {}), ("responses", {"input": "Hello"})):
        sent = {**body, **more}
        if path == "responses":
            del sent["messages"], sent["logprobs"], sent["max_tokens"]
            sent["max_output_tokens"] = 4
        response = httpx.post(f"{vllm.url}/v1/{path}", json=sent, timeout=TIMEOUT_S)
        assert (response.status_code, response.json()["model"]) == (200, "poems"), response.text
    tokens = httpx.post(
        f"{vllm.url}/tokenize", json={"model": "poems", "prompt": "Hello"}, timeout=TIMEOUT_S
    )
    assert tokens.status_code == 200, tokens.text
    removed(vllm, "poems")
