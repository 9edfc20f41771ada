"""A cluster in front of vLLM servers that kvroute does not run."""

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from tests.support.attached import BLOCK, NAME, AttachableServer, attachable_servers
from tests.support.bodies import calls, comparable
from tests.support.event_streams import Joined
from tests.support.serving import KVROUTE, Cluster, doctor, start_cluster
from tests.support.waiting import wait_until

DOCUMENTS, QUESTIONS = 8, 5
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TIMEOUT_S = 300.0  # a long prompt takes many seconds on a busy CPU


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[AttachableServer]]:
    folder = tmp_path_factory.mktemp("attached")
    with attachable_servers(Path(resolve(BUILTIN_MODEL)), folder) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(servers: list[AttachableServer]) -> Iterator[Cluster]:
    options = [option for server in servers for option in ("--attach", server.url)]
    with start_cluster(*options) as running:
        yield running


def post(url: str, *, json: Any) -> httpx.Response:
    return httpx.post(url, json=json, timeout=TIMEOUT_S)


def document(number: int, *, seed: str = "") -> str:
    words = Random(f"{seed}{number}").choices(range(10_000), k=150)
    return " ".join(map(str, words))


def question(number: int, text: str) -> dict[str, Any]:
    content = f"{document(number)}\n{text}"
    return {"model": NAME, "prompt": content, "max_tokens": 4, "temperature": 0}


def cached_tokens(response: httpx.Response) -> int:
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_no_option_but_the_addresses_is_needed(
    cluster: Cluster, servers: list[AttachableServer]
) -> None:
    for server in servers:
        assert f"{server.url} serves {NAME}, vLLM " in cluster.output()
    models = httpx.get(f"{cluster.url}/v1/models").json()["data"]
    assert [model["id"] for model in models] == [NAME]


def is_refused(answer: httpx.Response) -> bool:
    return answer.status_code >= 400 or answer.text.startswith('data: {"error"')


def test_answers_equal_the_servers_own(cluster: Cluster, servers: list[AttachableServer]) -> None:
    def difference(call: tuple[str, dict[str, Any]]) -> list[Any]:
        path, body = call
        ours, theirs = (post(f"{url}{path}", json=body) for url in (cluster.url, servers[0].url))
        if is_refused(ours) and is_refused(theirs):
            return []  # errors of a router have the same shape on all routes, vLLM's have not
        found, expected = comparable(ours.content), comparable(theirs.content)
        if ours.status_code == theirs.status_code and body["stream"] is True:
            is_equal = Joined(found) == Joined(expected)  # a busy engine joins events
        else:
            is_equal = found == expected
        return [] if is_equal else [path, body, found, expected]

    with ThreadPoolExecutor(6) as pool:
        different = [*filter(None, pool.map(difference, calls(NAME)))]
    assert not different, json.dumps(different[:3], indent=1)


def test_questions_go_where_their_document_is_cached(cluster: Cluster) -> None:
    """All but each document's first question hit; no placement can have more."""
    rng, first, misses = Random(1), set[int](), []
    order = [number for number in range(DOCUMENTS) for _ in range(QUESTIONS)]
    rng.shuffle(order)
    for turn, number in enumerate(order):
        response = post(f"{cluster.url}{COMPLETIONS}", json=question(number, f"Question {turn}?"))
        expected = int(response.headers["x-kvroute-expected-tokens"])
        assert expected == cached_tokens(response)
        if number in first and not expected:
            misses.append((turn, number))
        first.add(number)
    assert not misses


def test_a_salt_separates_tenants(cluster: Cluster) -> None:
    body = question(100, "") | {"cache_salt": "one"}
    other = body | {"cache_salt": "two"}
    url = f"{cluster.url}{COMPLETIONS}"
    counts = [cached_tokens(post(url, json=sent)) > 0 for sent in (body, body, other, other)]
    assert counts == [False, True, False, True]


def test_a_named_prefix_is_computed_before_it_is_used(cluster: Cluster) -> None:
    declared = {"id": "manual", "prompt": document(200), "model": NAME}
    refused = post(f"{cluster.url}/v1/prefixes", json=declared)
    assert refused.status_code == 409
    assert "attached server" in refused.json()["error"]["message"]
    unpinned = post(f"{cluster.url}/v1/prefixes", json=declared | {"pinned": False})
    unpinned.raise_for_status()

    def is_warm() -> bool:
        body = question(0, "") | {"prompt": "What?", "prefix_id": "manual"}
        return cached_tokens(post(f"{cluster.url}{COMPLETIONS}", json=body)) >= BLOCK

    wait_until(is_warm)
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "prefix_id": "manual"}
    refused = post(f"{cluster.url}{CHAT}", json=body)
    assert refused.status_code == 400
    assert "send the prefix as a part of the messages" in refused.json()["error"]["message"]


def test_the_doctor_finds_nothing(cluster: Cluster) -> None:
    finished = doctor(cluster)
    assert finished.returncode == 0, finished.stdout


def test_scale_takes_no_server_away(cluster: Cluster) -> None:
    command = [*KVROUTE, "scale", "1", "--url", cluster.url]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert refused.returncode == 1
    assert "all replicas are attached servers" in refused.stderr
    assert len(cluster.titled("kvroute:Replica")) == 2


def test_a_replica_needs_little_memory(cluster: Cluster) -> None:
    replicas = cluster.titled("kvroute:Replica")
    assert len(replicas) == 2
    assert max(process.memory_full_info().uss for process in replicas) < 200e6


def test_a_killed_server_costs_no_request_without_a_first_byte(
    cluster: Cluster, servers: list[AttachableServer]
) -> None:
    """And the server is used again soon after it is back, with what it has cached now."""
    ends_s = time.monotonic() + 6.0

    def ask(number: int) -> list[tuple[int, str]]:
        answers = []
        with httpx.Client(base_url=cluster.url, timeout=120) as client:
            while time.monotonic() < ends_s:
                body = question(number % DOCUMENTS, f"{number} {time.monotonic()}?")
                response = client.post(COMPLETIONS, json=body)
                answers.append((response.status_code, response.text))
        return answers

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, number) for number in range(4)]
        time.sleep(2.0)
        servers[0].kill()
        failed = [each for future in asking for each in future.result() if each[0] != 200]
    assert not failed
    wait_until(lambda: _replicas(cluster) == 1)
    servers[0].start()
    servers[0].wait()
    wait_until(lambda: _replicas(cluster) == 2, within_s=5.0)
    test_questions_go_where_their_document_is_cached(cluster)


def lines_with_a_kill(
    cluster: Cluster, servers: list[AttachableServer], path: str, body: dict[str, Any]
) -> list[str]:
    """Return the lines of a stream whose server is killed after ten of them."""
    with httpx.stream("POST", f"{cluster.url}{path}", json=body, timeout=TIMEOUT_S) as response:
        lines = response.iter_lines()
        got = [next(lines) for _ in range(10)]
        busy = [server for server in servers if _running(server)]
        for server in busy:
            server.kill()
        got += lines
    assert len(busy) == 1
    busy[0].start()
    busy[0].wait()
    wait_until(lambda: _replicas(cluster) == 2)
    return got


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_goes_on_when_its_server_is_killed(
    cluster: Cluster, servers: list[AttachableServer], path: str
) -> None:
    own = {"messages": [{"role": "user", "content": "Count."}]} if path == CHAT else question(0, "")
    body = {"model": NAME, "stream": True, "temperature": 0, **own}
    body |= {"min_tokens": 600, "max_tokens": 600, "stream_options": {"include_usage": True}}
    expected = Joined(comparable(post(f"{servers[0].url}{path}", json=body).content))
    got = lines_with_a_kill(cluster, servers, path, body)
    assert Joined(comparable("\n".join(got).encode())) == expected


def test_a_stream_with_tools_ends_with_an_error(
    cluster: Cluster, servers: list[AttachableServer]
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"model": NAME, "messages": [{"role": "user", "content": "Count."}], "stream": True}
    body |= {"max_tokens": 1500, "ignore_eos": True, "tools": [tool], "tool_choice": "none"}
    lines = lines_with_a_kill(cluster, servers, CHAT, body)
    errors = [line for line in lines if line.startswith('data: {"error"')]
    assert len(errors) == 1
    assert "attached server" in errors[0]


def test_a_killed_replica_is_replaced_and_knows_its_server_again(cluster: Cluster) -> None:
    body = question(300, "Remember?")
    first = post(f"{cluster.url}{COMPLETIONS}", json=body)
    for process in cluster.titled("kvroute:Replica"):
        process.kill()

    def is_known_again() -> bool:
        response = post(f"{cluster.url}{COMPLETIONS}", json=body)
        others = response.headers["x-kvroute-replica"] != first.headers["x-kvroute-replica"]
        return others and int(response.headers["x-kvroute-expected-tokens"]) > 0

    wait_until(is_known_again)


def test_without_a_server_requests_end_at_their_deadline(
    cluster: Cluster, servers: list[AttachableServer]
) -> None:
    """They get an error that can be retried."""
    for server in servers:
        server.kill()
    bodies = {
        COMPLETIONS: question(0, ""),
        CHAT: {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]},
    }
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        for path, body in bodies.items():
            ended = client.post(path, json=body, headers={"x-kvroute-deadline-s": "2"})
            assert ended.status_code == 503, ended.text
            assert ended.json()["error"]["code"] == "unavailable"
    for server in servers:
        server.start()
    for server in servers:
        server.wait()
    wait_until(lambda: _replicas(cluster) == len(servers))


def _replicas(cluster: Cluster) -> int:
    """Return how many replicas are in the index."""
    return len(httpx.get(f"{cluster.url}/v1/cluster").json()["replicas"])


def _running(server: AttachableServer) -> bool:
    text = httpx.get(f"{server.url}/metrics").text
    (line,) = (line for line in text.splitlines() if line.startswith("vllm:num_requests_running"))
    return float(line.rpartition(" ")[2]) > 0
