"""What a server says about itself, and the lists and options of attached servers."""

import asyncio
import json
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvroute.contract.http_call import HttpCall
from kvroute.contract.records import MAX_COUNT
from kvroute.process import vllm_build
from kvroute.replica.attached_engine.child_server import _flags
from kvroute.replica.attached_engine.server_client import (
    NoConnectionError,
    Reply,
    ServerClient,
    _certificates,
    _refused_handshake,
)
from kvroute.replica.attached_engine.server_facts import (
    USUAL_TOKENS_PER_S,
    EventAddress,
    ServerError,
    load_of,
    read_facts,
    read_samples,
)
from kvroute.replica.attached_engine.server_rendering import render
from kvroute.settings import looked_up as looked_up_module
from kvroute.settings.help import SettingsError
from kvroute.settings.serve import load
from kvroute.settings.server_list import ServerList
from tests.support.certificates import certificate
from tests.support.scripted_client import Asked, ScriptedClient
from tests.support.waiting import wait_until

URL = "http://gpu-1:8000"
MODELS = {
    "data": [
        {"id": "m", "root": "/models/m", "parent": None, "max_model_len": 4096},
        {"id": "adapter", "root": "/adapters/a", "parent": "m"},
    ]
}
METRICS = """# HELP vllm:num_requests_running Number of running requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:cache_config_info{CACHE,engine="0"} 1.0
vllm:cache_config_info{CACHE,engine="1"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 50000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 20000.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 10.0
other_metric 1.0
""".replace("CACHE", 'block_size="16",enable_prefix_caching="True",num_gpu_blocks="101"')
SOURCES = {
    "0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://0.0.0.0:6557", "topic": "kv"},
    "1": {"endpoint": "tcp://*:5558", "replay_endpoint": None},
}
ANSWERS: Mapping[str, Any] = {
    "/v1/models": MODELS,
    "/metrics": METRICS,
    "/kv_event_sources": SOURCES,
    "/version": {"version": "0.32.0"},
}


def server(answers: Mapping[str, Any]) -> ScriptedClient:
    def answer(asked: Asked) -> Reply:
        if (body := answers.get(asked.path)) is None:
            return Reply(404, b"")
        text = body if isinstance(body, str) else json.dumps(body)
        return Reply(200, text.encode())

    return ScriptedClient(URL, answer)


async def test_the_facts_of_a_server() -> None:
    facts = await read_facts(server(ANSWERS))
    assert (facts.model, facts.model_path, facts.max_model_len) == ("m", "/models/m", 4096)
    first, second = facts.ranks
    assert (first.block_size, first.capacity_blocks) == (16, 100)
    assert first.events == EventAddress("tcp://gpu-1:5557", "tcp://gpu-1:6557", "kv")
    assert second.events is None, "events that cannot be replayed are not followed"


async def test_a_connection_that_the_server_closes_just_then_costs_no_answer() -> None:
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await reader.readuntil(b"\r\n\r\n")
        writer.close()  # instead of a second response

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        client = ServerClient(f"http://127.0.0.1:{port}")
        assert [await client.get("/health") for _ in range(2)] == [Reply(200, b"ok")] * 2
        await client.close()
    assert connections == 2


async def test_the_prefill_speed_is_the_measured_one_if_there_is_one() -> None:
    first, second = (await read_facts(server(ANSWERS))).ranks
    assert first.prefill_tokens_per_s == 3000.0
    assert second.prefill_tokens_per_s == USUAL_TOKENS_PER_S


async def test_the_load_of_each_rank() -> None:
    samples = await read_samples(server(ANSWERS))
    load = load_of(samples, 0, 100)
    assert (load.running, load.waiting, load.used_blocks) == (3, 2, 50)
    assert load_of(samples, 1, 100).running == 1
    assert load_of(samples, 7, 100).running == 0


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1.0", "1e300"])
async def test_a_load_that_cannot_be_true_is_none_or_the_highest_count(value: str) -> None:
    metrics = METRICS.replace(" 3.0", f" {value}").replace(" 0.5", f" {value}")
    load = load_of(await read_samples(server({"/metrics": metrics})), 0, 100)
    assert 0 <= load.running <= MAX_COUNT
    assert 0 <= load.used_blocks <= 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"/v1/models": None}, "status 404"),
        ({"/v1/models": {"data": []}}, "lists no model"),
        ({"/v1/models": "<html>"}, "is it a vLLM server"),
        ({"/v1/models": []}, "is it a vLLM server"),
        ({"/metrics": "a 1\n"}, "no vllm:cache_config_info"),
        ({"/v1/models": "[" * 100_000}, "is it a vLLM server"),
        ({"/v1/models": {"data": ["m"]}}, "is it a vLLM server"),
        ({"/v1/models": {"data": [{"id": "\ud800"}]}}, "is it a vLLM server"),
        ({"/v1/models": {"data": [{"id": "\x1b[2J"}]}}, r"x1b\[2J'; give it a name"),
        ({"/metrics": METRICS.replace("num_gpu_blocks", "blocks")}, "is it a vLLM server"),
    ],
)
async def test_a_server_that_cannot_be_attached_is_named(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ServerError, match=f"{URL}.*{message}"):
        await read_facts(server({**ANSWERS, **change}))


@pytest.mark.parametrize("missing", ["/kv_event_sources", "/version"])
async def test_older_servers_lack_some_routes(missing: str) -> None:
    facts = await read_facts(server({**ANSWERS, missing: None}))
    assert len(facts.ranks) == 2


@pytest.mark.parametrize(
    ("path", "body", "messages"),
    [
        ("/v1/messages", {"system": "S", "messages": [{"role": "user", "content": "U"}]}, "SU"),
        ("/v1/responses", {"instructions": "S", "input": "U"}, "SU"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "U"}]}]},
            "U",
        ),
    ],
)
async def test_conversations_of_text_are_tokenised_by_the_server(
    path: str, body: dict[str, Any], messages: str
) -> None:
    asked: list[dict[str, Any]] = []

    def answer(question: Asked) -> Reply:
        if question.path != "/tokenize":
            return Reply(404, b"")
        asked.append(json.loads(question.body))
        return Reply(200, b'{"tokens": [1, 2, 3]}')

    client = ScriptedClient(URL, answer)
    rendered = await render(client, HttpCall(path, json.dumps(body).encode(), 0.0))
    assert rendered.is_text
    assert len(rendered.token_ids) == 3 * 4
    assert "".join(message["content"] for message in asked[0]["messages"]) == messages


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": "hi"},
        {"messages": [{"role": "user", "content": "U"}], "tools": [{}]},
        {"messages": [{"role": "user", "content": "U"}], "truncate_prompt_tokens": 8},
        [],
    ],
)
async def test_a_prompt_that_is_not_known_matches_no_other(body: Any) -> None:
    client = server({})
    call = HttpCall("/v1/messages", json.dumps(body).encode(), 0.0)
    first, second = [await render(client, call) for _ in range(2)]
    assert not first.is_text
    assert first.refusal is None, "the server itself refuses the body"
    assert first.media != second.media


def test_a_file_adds_servers_and_may_change(tmp_path: Path) -> None:
    file = tmp_path / "servers.txt"
    listed = ServerList(["http://a:1"], file)
    assert listed.urls() == ["http://a:1"]
    assert listed.problem
    file.write_text("http://b:1/  # the second\n\n# none\nhttp://a:1\n")
    assert listed.urls() == ["http://a:1", "http://b:1"]
    file.write_text("nonsense\n")
    assert listed.urls() == ["http://a:1", "http://b:1"], "a wrong file counts as unchanged"
    file.unlink()
    assert listed.urls() == ["http://a:1", "http://b:1"]


@pytest.mark.parametrize("line", ["nonsense", "http://[::1", "http://c:99999", "http://c:1/v1"])
def test_an_invalid_line_costs_no_server(tmp_path: Path, line: str) -> None:
    file = tmp_path / "servers.txt"
    file.write_text(f"http://a:1\n{line}\n")
    assert load({"attach_file": file}).servers == ("http://a:1",)
    listed = ServerList([], file)
    assert listed.urls() == ["http://a:1"]
    assert f"the line {line!r} is not used (expected http://HOST:PORT" in listed.problem
    file.write_text("http://a:1\nhttp://b:1\n")
    assert listed.urls() == ["http://a:1", "http://b:1"]
    file.write_text(f"http://a:1\n{line}\n")
    assert listed.urls() == ["http://a:1", "http://b:1"], "an edited line may be of either server"
    file.write_text(f"{line}\n")
    with pytest.raises(SettingsError, match=r"--attach-file is .*cannot be used \(the line"):
        load({"attach_file": file})


def test_the_servers_of_a_dns_name_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def addresses(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        assert (host, port) == ("vllm.prod", 8000)
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = {False: socket.AF_INET, True: socket.AF_INET6}
        return [(families[":" in each], 0, 0, "", (each, port)) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    monkeypatch.setattr(looked_up_module, "LOOKUP_S", 0.01)
    name = "vllm.prod:8000"
    with pytest.raises(SettingsError, match=f"--attach-dns is '{name}', at which no server is"):
        load({"attach_dns": [name]})
    found += ["10.0.0.2", "10.0.0.1", "fd00::1"]
    wait_until(lambda: not looked_up_module.looked_up(name).problem)
    listed = ServerList(["http://a:1"], None, [name])
    assert listed.urls() == ["http://a:1", "http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert load({"attach_dns": [name]}).servers == tuple(listed.urls()[1:])
    found[:] = ["fd00::2"]
    wait_until(lambda: listed.urls()[1:] == ["http://[fd00::2]:8000"])
    found.clear()
    wait_until(lambda: "not known" in looked_up_module.looked_up(name).problem)
    assert listed.urls()[1:] == ["http://[fd00::2]:8000"], "a failed lookup removes no server"


@pytest.mark.parametrize("name", ["vllm", "http://vllm:8000", "vllm:0", "vllm:8000/v1", ":8000"])
def test_a_dns_name_needs_a_port(name: str) -> None:
    with pytest.raises(SettingsError, match="expected NAME:PORT, without http:// before it"):
        load({"attach_dns": [name]})


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "set --attach-key-file"), (500, "see the server's log")]
)
async def test_a_status_has_its_own_remedy(status: int, remedy: str) -> None:
    refusing = ScriptedClient(URL, lambda asked: Reply(status, b""))
    with pytest.raises(ServerError, match=f"status {status}; {remedy}"):
        await read_facts(refusing)


@pytest.mark.parametrize(
    ("scheme", "has_tls", "is_trusted", "problem"),
    [
        (
            "https",
            True,
            False,
            "not accepted: self-signed certificate.; set SSL_CERT_FILE to a file",
        ),
        ("https", False, False, "TLS: .*; give its address as http://"),
        ("http", False, False, "status 404; expected a vLLM server"),
        ("https", True, True, "status 404; expected a vLLM server"),
    ],
)
async def test_a_server_with_a_certificate(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    has_tls: bool,
    is_trusted: bool,
    problem: str,
) -> None:
    """SSL_CERT_FILE names the authorities that are trusted."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    cert, key = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    _certificates.cache_clear()
    tls = context if has_tls else None
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as listening:
        port = listening.sockets[0].getsockname()[1]
        client = ServerClient(f"{scheme}://127.0.0.1:{port}")
        with pytest.raises(ServerError, match=problem):
            await read_facts(client)
        await client.close()
    _certificates.cache_clear()


@pytest.mark.parametrize("content", [None, "no certificate"])
async def test_a_file_of_authorities_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    file = tmp_path / "ca.pem"
    if content:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    _certificates.cache_clear()
    with pytest.raises(ServerError, match=f"SSL_CERT_FILE is '{file}': .*; set it to a PEM file"):
        await read_facts(ServerClient("https://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(10, "renew the certificate"), (62, "use an address that the certificate has")],
)
def test_a_certificate_that_is_not_accepted_has_its_own_remedy(code: int, remedy: str) -> None:
    error = ssl.SSLCertVerificationError(1, "refused")
    error.verify_code, error.verify_message = code, "why"
    found = _refused_handshake(error)
    assert (str(found), found.remedy) == ("its certificate is not accepted: why", remedy)


async def test_a_server_that_does_not_run_was_not_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    client = ServerClient(f"http://127.0.0.1:{port}")
    with pytest.raises(NoConnectionError, match="Connection refused"):
        await client.get("/health")
    await client.close()


def test_each_server_has_a_replica(tmp_path: Path) -> None:
    file = tmp_path / "servers.txt"
    file.write_text("http://b:1\nhttp://c:1\n")
    settings = load({"attach": ["http://a:1,http://b:1/"], "attach_file": file})
    (model,) = settings.resolve(redis_url="redis://x")
    assert model.replicas == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attach": ["gpu-1:8000"]}, "--attach is .*expected http://HOST:PORT"),
        ({"attach": ["http://a:1/v1"]}, "without a path"),
        ({"attach": ["http://a:1"], "max_replicas": 4}, "--max-replicas does not work"),
        ({"attach": ["http://a:1"], "engine": "simulated"}, "--engine simulated does not work"),
        ({"attach_file": "/nowhere/servers.txt"}, "--attach-file is .*cannot be used"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(options)


def test_an_empty_file_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "servers.txt").write_text("# none yet\n")
    with pytest.raises(SettingsError, match="lists no server"):
        load({"attach_file": tmp_path / "servers.txt"})


def test_options_become_flags_of_vllms_command_line() -> None:
    options = {
        "max_model_len": 4096,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "revision": None,
        "kv_events_config": {"a": 1},
        "lora_modules": ["x=/x", "y=/y"],
    }
    assert [*_flags(options)] == [
        *("--max-model-len", "4096", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--kv-events-config", '{"a": 1}', "--lora-modules", "x=/x", "y=/y"),
    ]


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.1", "0.33.0rc1", "0.32.0+cpu"])
def test_supported_versions(version: str) -> None:
    assert vllm_build.problem(version) == ""


@pytest.mark.parametrize("version", ["0.29.0", "0.30.2", "0.34.0", "1.32.0", "dev"])
def test_other_versions_get_one_line_with_the_supported_ones(version: str) -> None:
    problem = vllm_build.problem(version)
    assert problem.endswith(f"supports vLLM 0.31 to 0.33, found {version}")
