"""A cluster with API keys: strangers and other tenants get nothing of what is not theirs."""

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import openai
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards.promql import filled_in
from dashboards.tenants import TENANTS
from kvroute.features.gate import Role
from kvroute.features.keys.key_file import read
from kvroute.local.running import KEY
from tests.support.adapters import write_adapter
from tests.support.browser import page
from tests.support.fuzzing import BASES, PATHS, bodies, changed, check, fuzzing, texts
from tests.support.prometheus_server import prometheus
from tests.support.serving import KVROUTE, Cluster, start_cluster
from tests.support.untested import obstacle
from tests.support.waiting import wait_until

MODEL = "SmolLM2-135M-Instruct"
ALLOWED = "https://chat.example"
ROUTES = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/route"),
    ("POST", "/v1/prefixes"),
    ("DELETE", "/v1/prefixes/x"),
    ("GET", "/v1/prefixes"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("GET", "/v1/adapters"),
    ("GET", "/v1/models"),
    ("GET", "/v1/cluster"),
    ("GET", "/v1/cluster/history"),
    ("GET", "/v1/cluster/live"),
    ("GET", "/v1/cluster/tenants"),
    ("GET", "/v1/cluster/audit"),
    ("POST", "/v1/cluster/canary"),
    ("GET", "/v1/metrics/targets"),
    ("GET", "/v1/responses/x"),
    ("DELETE", "/v1/sessions/x"),
)


# What a tenant may use.
OWN = (
    *("/v1/chat/completions", "/v1/route", "/v1/models"),
    *("/v1/responses/x", "/v1/sessions/x"),
)


@dataclass(frozen=True, slots=True)
class Keyed:
    cluster: Cluster
    path: Path

    def add(self, tenant: str, *roles: Role) -> str:
        options = [f"--role={role}" for role in roles]
        return self.kvroute("keys", "add", "--tenant", tenant, *options).stdout.strip()

    def kvroute(self, *args: str, key: str = "") -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "KVROUTE_API_KEYS": str(self.path), KEY: key}
        command = [*KVROUTE, *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=110)

    def client(self, key: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.cluster.url, headers=headers, timeout=60)

    def status(self, key: str) -> int:
        with self.client(key) as client:
            return client.get("/v1/models").status_code


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    first = subprocess.run(
        [*KVROUTE, "keys", "add", "--tenant", "first", "--file", str(path)], check=True
    )
    assert first.returncode == 0
    for seed, name in enumerate(("one", "other")):
        write_adapter(path.parent / "adapters" / name, seed=seed)
    options = (
        *("--replicas", "1", "--api-keys", str(path), "--allow-origin", ALLOWED),
        *("--lora-root", str(path.parent / "adapters")),
    )
    with start_cluster("--engine", "simulated", *options) as cluster:
        yield Keyed(cluster, path)


@pytest.fixture(scope="module")
def tenants(keyed: Keyed) -> tuple[str, str]:
    """The keys of two."""
    keys = keyed.add("a"), keyed.add("b")
    wait_until(lambda: [keyed.status(key) for key in keys] == [200, 200])
    return keys


@pytest.fixture(scope="module")
def operator(keyed: Keyed) -> str:
    key = keyed.add("operators", "use", "observe", "manage")
    wait_until(lambda: keyed.status(key) == 200)
    return key


def chat(text: str, **more: object) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 2,
        "messages": [{"role": "user", "content": text}],
        **more,
    }


def cached(client: httpx.Client, body: dict[str, Any]) -> int:
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_strangers_and_wrong_keys_reach_health_and_nothing_else(keyed: Keyed) -> None:
    """All at once: each refusal of a wrong key waits for a while."""
    known = read(keyed.path).keys[0].id
    async with httpx.AsyncClient(base_url=keyed.cluster.url, timeout=60) as client:
        assert (await client.get("/health")).status_code == 200
        answers = await asyncio.gather(
            *(
                client.request(
                    method,
                    path,
                    json={} if method == "POST" else None,
                    headers={"authorization": f"Bearer {key}"} if key else {},
                )
                for key in ("", "sk-1", f"kvr-{known}-x")
                for method, path in ROUTES
            )
        )
    assert [answer.status_code for answer in answers] == [401] * len(answers)
    assert len(answers) == 3 * len(ROUTES)


def test_a_tenant_changes_and_watches_nothing(keyed: Keyed, tenants: tuple[str, str]) -> None:
    with keyed.client(tenants[0]) as client:
        for method, path in ROUTES:
            if path in OWN:
                continue
            answer = client.request(method, path, json={} if method == "POST" else None)
            assert answer.status_code == 403, (method, path)


def test_a_tenant_cannot_name_images(keyed: Keyed, tenants: tuple[str, str]) -> None:
    """vLLM would give it the image that another tenant has sent under that name."""
    part = {"type": "image_url", "image_url": {"url": "data:,"}, "uuid": "logo"}
    body = {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
    with keyed.client(tenants[0]) as client:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/route", "/tokenize"):
            answer = client.post(path, json=body)
            assert (answer.status_code, "uuid" in answer.text) == (400, True), path


def test_what_a_tenant_has_cached_is_found_by_it_alone(
    keyed: Keyed, tenants: tuple[str, str]
) -> None:
    text = "The parties agree to keep what follows to themselves. " * 40
    with keyed.client(tenants[0]) as a, keyed.client(tenants[1]) as b:
        assert cached(a, chat(text)) == 0
        own = cached(a, chat(text))
        assert own > 300
        assert cached(b, chat(text)) == 0
        assert cached(b, chat(text)) == own
        assert cached(a, chat(text, cache_salt="mine")) == 0
        assert cached(b, chat(text, cache_salt="mine")) == 0


def test_where_a_prompt_would_go_says_nothing_of_others(
    keyed: Keyed, tenants: tuple[str, str]
) -> None:
    body = chat("Nobody else knows that this was asked here. " * 40)
    with keyed.client(tenants[0]) as a, keyed.client(tenants[1]) as b:
        assert cached(a, body) == 0
        wait_until(lambda: hits(a, body) > 300)
        assert hits(b, body) == 0


def hits(client: httpx.Client, body: dict[str, Any]) -> int:
    """Cached tokens, as the router knows."""
    (receipt,) = client.post("/v1/route", json=body).json()["receipts"]
    return int(max(each["hit_tokens"] for each in receipt["replicas"]))


def test_a_shared_prefix_is_cached_for_all_tenants_and_what_follows_it_for_none(
    keyed: Keyed, tenants: tuple[str, str], operator: str
) -> None:
    rules = "Be brief, be kind, and cite the paragraph that you rely on. " * 40
    with keyed.client(operator) as manager:
        body = {"id": "rules", "prompt": rules, "shared": True}
        declared = manager.post("/v1/prefixes", json=body).json()
        wait_until(lambda: manager.get("/v1/prefixes/rules").json()["warm_on"])
    shared = declared["tokens"] - declared["partial_tokens"]
    assert shared > 300
    question = {"model": MODEL, "prompt": "What does paragraph nine say of it? " * 30}
    named = {**question, "prefix_id": "rules", "max_tokens": 1}
    with keyed.client(tenants[0]) as a, keyed.client(tenants[1]) as b:
        assert completed(a, named) == shared
        assert completed(a, named) > shared + 200
        assert completed(b, named) == shared
        assert completed(b, {**named, "cache_salt": "mine"}) == shared
        same_text = {**question, "prompt": rules + question["prompt"], "max_tokens": 1}
        assert completed(b, same_text) == shared


def test_an_adapter_of_a_tenant_is_nobody_elses(
    keyed: Keyed, tenants: tuple[str, str], operator: str
) -> None:
    def add(folder: str, tenant: str, key: str) -> "subprocess.CompletedProcess[str]":
        owner = ("--tenant", tenant, "--url", keyed.cluster.url)
        return keyed.kvroute("adapters", "add", "law", folder, *owner, key=key)

    assert "needs an API key with the role manage" in add("one", "a", tenants[0]).stderr
    assert add("one", "a", operator).returncode == 0
    with keyed.client(tenants[0]) as own, keyed.client(tenants[1]) as other:
        text = {**chat("What does the law say? " * 40), "model": "law"}
        assert "law" in {card["id"] for card in own.get("/v1/models").json()["data"]}
        assert "law" not in other.get("/v1/models").text
        assert other.post("/v1/chat/completions", json=text).status_code == 404
        assert other.get("/v1/models/law").status_code == 404
        cached(own, text)
        assert add("other", "b", operator).returncode == 0
        cards = [client.get("/v1/models/law").json() for client in (own, other)]
        assert [Path(card["root"]).name for card in cards] == ["one", "other"]
        assert cached(other, text) == 0
    shown = keyed.kvroute("adapters", "list", "--url", keyed.cluster.url, key=operator).stdout
    folders = [Path(word).name for word in shown.split() if "/adapters/" in word]
    assert sorted(folders) == ["one", "other"]


def test_a_tenants_prefix_is_nobody_elses(keyed: Keyed, tenants: tuple[str, str]) -> None:
    text = "The merger of the two companies closes in March, before the news. " * 40
    manager = keyed.add("a", "manage", "observe")
    wait_until(lambda: keyed.status(manager) == 200)
    stranger = keyed.add("b", "manage", "observe")
    wait_until(lambda: keyed.status(stranger) == 200)
    with keyed.client(manager) as own, keyed.client(stranger) as other:
        declared = own.post("/v1/prefixes", json={"id": "merger", "prompt": text}).json()
        wait_until(lambda: own.get("/v1/prefixes/merger").json()["warm_on"])
        assert other.get("/v1/prefixes/merger").status_code == 404
        assert other.delete("/v1/prefixes/merger").status_code == 404
        assert "merger" not in other.get("/v1/prefixes").text
        assert (
            other.post("/v1/prefixes", json={"id": "merger", "prompt": "Hi. " * 99}).status_code
            == 201
        )
    named = {"model": MODEL, "prompt": "When?", "prefix_id": "merger", "max_tokens": 1}
    with keyed.client(tenants[0]) as a, keyed.client(tenants[1]) as b:
        assert completed(a, named) == declared["tokens"] - declared["partial_tokens"]
        assert completed(b, {**named, "prompt": text}) < 200
        assert completed(b, {"model": MODEL, "prompt": text, "max_tokens": 1}) == 0


def completed(client: httpx.Client, body: dict[str, Any]) -> int:
    """Cached tokens."""
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@fuzzing
@given(data=st.data(), path=st.sampled_from(sorted(BASES)), content=st.none() | bodies)
def test_any_body_of_a_tenant(
    keyed: Keyed,
    operator: str,
    tenants: tuple[str, str],
    data: st.DataObject,
    path: str,
    content: bytes | None,
) -> None:
    key = data.draw(st.sampled_from([operator, *tenants]))
    body = json.dumps(changed(data, path)).encode() if content is None else content
    with keyed.client(key) as client:
        check(client.post(path, content=body))


@fuzzing
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH"]),
    path=st.sampled_from(PATHS),
    name=texts,
    has_key=st.booleans(),
)
def test_any_path_with_a_tenants_key_and_without(
    keyed: Keyed, tenants: tuple[str, str], method: str, path: str, name: str, has_key: bool
) -> None:
    with keyed.client(tenants[0] if has_key else "") as client:
        answer = client.request(method, path.format(quote(name, safe="")))
    check(answer)
    if not has_key and not path.startswith(("/health", "/{}")):
        assert answer.status_code in (401, 404, 405), answer.text


def test_a_revoked_key_is_refused_within_seconds(keyed: Keyed) -> None:
    key = keyed.add("leaving")
    wait_until(lambda: keyed.status(key) == 200)
    assert keyed.kvroute("keys", "revoke", key.split("-")[1]).returncode == 0
    wait_until(lambda: keyed.status(key) == 401)


def test_the_page_asks_for_a_key_and_keeps_it_out_of_addresses(
    keyed: Keyed, tenants: tuple[str, str], operator: str
) -> None:
    if reason := obstacle("chromium"):
        pytest.skip(reason)
    state = "document.querySelector('#connection')?.textContent"
    with page() as shown:
        shown.open(f"{keyed.cluster.url}/ui", width=1000)
        shown.wait_for(f"{state} === 'an API key is needed'")
        states = {
            "kvr-wrong": "this API key is unknown or revoked",
            tenants[0]: "this API key may not observe",
            operator: "live",
        }
        for key, then in states.items():
            shown.evaluate(f"document.querySelector('#key').value = '{key}'")
            shown.evaluate("document.querySelector('#login').requestSubmit()")
            shown.wait_for(f"{state} === '{then}'")
        shown.wait_for("document.querySelectorAll('.tile[data-state=ready]').length === 1")
        assert shown.evaluate("document.querySelector('#login').hidden")
        addresses = "performance.getEntries().map((entry) => entry.name).join() + location.href"
        assert "kvr-" not in shown.evaluate(addresses)


def test_commands_send_the_users_key(keyed: Keyed, operator: str, tenants: tuple[str, str]) -> None:
    without = keyed.kvroute("status", "--url", keyed.cluster.url)
    assert without.returncode == 1
    assert KEY in without.stderr.replace("\n", " ")
    wrong_role = keyed.kvroute("status", "--url", keyed.cluster.url, key=tenants[0])
    assert "role observe" in wrong_role.stderr.replace("\n", " ")
    assert keyed.kvroute("status", "--url", keyed.cluster.url, key=operator).returncode == 0
    checked = keyed.kvroute("doctor", "--audit", "--url", keyed.cluster.url, key=operator)
    assert checked.returncode == 0, checked.stdout
    assert "requests need API keys" in checked.stdout


def test_clients_of_openai_have_an_error_that_they_know(
    keyed: Keyed, tenants: tuple[str, str]
) -> None:
    body = chat("Hi")
    url = f"{keyed.cluster.url}/v1"
    with openai.OpenAI(base_url=url, api_key=tenants[0], max_retries=0) as client:
        assert client.chat.completions.create(**body).usage
        wrong = client.with_options(api_key="sk-1")
        with pytest.raises(openai.AuthenticationError):
            wrong.chat.completions.create(**body)


def test_a_tenants_text_ends_no_message(keyed: Keyed, tenants: tuple[str, str]) -> None:
    with keyed.client(tenants[0]) as client:
        tokens = [
            client.post("/v1/chat/completions", json=chat(text)).json()["usage"]["prompt_tokens"]
            for text in ("a", "<|im_end|>")
        ]
    assert tokens[1] > tokens[0] + 3


def test_scripts_of_an_allowed_origin_have_keys_too(keyed: Keyed, tenants: tuple[str, str]) -> None:
    path, origin = "/v1/chat/completions", {"origin": ALLOWED}
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    with keyed.client("") as page, keyed.client(tenants[0]) as own:
        asked = page.options(path, headers=origin | preflight)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, ALLOWED)
        refused = page.post(path, json=chat("Hi"), headers=origin)
        answered = own.post(path, json=chat("Hi"), headers=origin)
        lost = own.get("/v1/unknown", headers=origin)
        assert [each.status_code for each in (refused, answered, lost)] == [401, 200, 404]
        for answer in (refused, answered, lost):
            assert answer.headers["access-control-allow-origin"] == ALLOWED
        foreign = {"origin": "https://elsewhere.example"}
        assert own.post(path, json=chat("Hi"), headers=foreign).status_code == 403
        assert page.options(path, headers=foreign | preflight).status_code == 403
        assert own.get("/v1/models", headers={"host": "kvroute.example"}).status_code == 200


def test_no_process_shows_a_key(keyed: Keyed, tenants: tuple[str, str]) -> None:
    for process in keyed.cluster.processes():
        with suppress(psutil.NoSuchProcess):
            shown = json.dumps([process.cmdline(), process.environ()])
            assert not any(key in shown for key in tenants)
    assert psutil.Process(keyed.cluster.process.pid).is_running()
    assert not any(key in keyed.cluster.output() for key in tenants)


@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs prometheus")
def test_every_panel_of_tenants_at_work_shows_something(
    keyed: Keyed, tenants: tuple[str, str], operator: str
) -> None:
    blank = set(TENANTS.queries())
    deadline = time.monotonic() + 120
    with prometheus(keyed.cluster, key=operator) as server:
        while blank:
            assert time.monotonic() < deadline, blank
            for key in tenants:
                with keyed.client(key) as client:
                    cached(client, chat("What do we pay for this? " * 40, max_tokens=20))
            shown = {query: server.values(_now(query)) for query in blank}
            blank = {query for query, values in shown.items() if len(values) < 2}


def _now(query: str) -> str:
    return filled_in(query, rate_interval="10s", time_range="30s")


def used(keyed: Keyed, operator: str) -> dict[str, dict[str, Any]]:
    """The account of each tenant, as the command prints it."""
    said = keyed.kvroute("tenants", "--format", "json", "--url", keyed.cluster.url, key=operator)
    assert said.returncode == 0, said.stderr
    return {account["tenant"]: account for account in json.loads(said.stdout)["data"]}


def test_accounts_have_all_that_tenants_asked_also_after_a_router_was_killed(
    keyed: Keyed, operator: str
) -> None:
    """The last test: the others' streams would end."""
    keys = {tenant: keyed.add(tenant) for tenant in ("payer", "saver")}
    wait_until(lambda: {keyed.status(key) for key in keys.values()} == {200})
    asked = {tenant: Counter[str]() for tenant in keys}

    def ask(tenant: str, text: str) -> None:
        with keyed.client(keys[tenant]) as client:
            answer = client.post("/v1/chat/completions", json=chat(text, max_tokens=20))
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        asked[tenant]["prompt"] += usage["prompt_tokens"]
        asked[tenant]["cached"] += usage["prompt_tokens_details"]["cached_tokens"]
        asked[tenant]["output"] += usage["completion_tokens"]

    def is_accounted() -> bool:
        accounts = used(keyed, operator)
        return {tenant: _tokens(accounts.get(tenant)) for tenant in keys} == asked

    for number in range(3):
        ask("payer", f"Number {number} is billed in full. " * 40)
        ask("saver", "This is billed once, and then is cached. " * 40)
    wait_until(is_accounted)
    (router,) = keyed.cluster.routers()
    router.kill()
    wait_until(lambda: _is_up(keyed, operator))
    assert is_accounted()
    ask("payer", "And then there was a router again. " * 40)
    wait_until(is_accounted)
    payer, saver = (used(keyed, operator)[tenant] for tenant in ("payer", "saver"))
    assert payer["requests"] == {"ok": 4, "cancelled": 0, "refused": 0, "failed": 0}
    assert saver["gpu_seconds_saved"] > payer["gpu_seconds_saved"]
    assert payer["gpu_seconds"]["prefill"] > saver["gpu_seconds"]["prefill"] > 0
    assert min(payer["gpu_seconds"]["decode"], saver["gpu_seconds"]["decode"]) > 0
    table = keyed.kvroute("tenants", "--url", keyed.cluster.url, key=operator).stdout
    assert table.index("payer") < table.index("saver"), "who used most comes first"


def _tokens(account: dict[str, Any] | None) -> Counter[str]:
    if account is None:
        return Counter()
    tokens = account["prompt_tokens"]
    cached = tokens["hit"] + tokens["unexpected_hit"]
    return Counter(prompt=sum(tokens.values()), cached=cached, output=account["output_tokens"])


def _is_up(keyed: Keyed, key: str) -> bool:
    """Whether a new router answers."""
    with suppress(httpx.TransportError):
        return len(keyed.cluster.routers()) == 1 and keyed.status(key) == 200
    return False
