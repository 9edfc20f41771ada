"""Limits of tenants hold on two routers together, and let in what is cached."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.serving import KVROUTE, Cluster, start_cluster
from tests.support.waiting import wait_until

MODEL = "SmolLM2-135M-Instruct"
CHATS = "/v1/chat/completions"
MINUTE = 600  # uncached tokens; a prompt below has more than half of them


def kvroute(*args: str) -> str:
    return subprocess.run([*KVROUTE, *args], check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True, slots=True)
class Limited:
    cluster: Cluster
    path: Path
    keys: dict[str, str]  # by tenant

    def client(self, tenant: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.Client(base_url=self.cluster.url, headers=headers, timeout=60)

    def limit(self, tenant: str, *options: str) -> None:
        kvroute("keys", "limit", tenant, *options, "--file", str(self.path))


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    keys = {
        tenant: kvroute("keys", "add", "--tenant", tenant, "--file", str(path)).strip()
        for tenant in ("few", "minute", "free")
    }
    file = ("--file", str(path))
    kvroute("keys", "limit", "few", "--max-requests", "2", *file)
    kvroute("keys", "limit", "minute", "--uncached-tokens-per-minute", f"{MINUTE}", *file)
    options = ("--engine", "simulated", "--replicas", "2", "--routers", "2")
    with start_cluster(*options, "--simulated-decode-ms", "30", "--api-keys", str(path)) as cluster:
        yield Limited(cluster, path, keys)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 2,
        "messages": [{"role": "user", "content": text}],
        **more,
    }


def statuses(client: httpx.Client, body: dict[str, Any], number: int = 6) -> list[int]:
    """Of so many answers one after the other, by whichever router."""
    return [client.post(CHATS, json=body).status_code for _ in range(number)]


def test_requests_under_way_count_on_both_routers(limited: Limited) -> None:
    long = chat("Tell me a long story.", max_tokens=1500, stream=True)
    with limited.client("few") as few, limited.client("free") as free:
        events = list[Iterator[bytes]]()
        with ExitStack() as streams:
            for _ in range(2):
                stream = streams.enter_context(few.stream("POST", CHATS, json=long))
                assert stream.status_code == 200
                assert stream.headers["x-ratelimit-limit-requests"] == "2"
                events.append(stream.iter_raw())  # an iterator that is gone ends its stream
                next(events[-1])
            wait_until(lambda: statuses(few, chat("Hi")) == [429] * 6)
            refused = few.post(CHATS, json=chat("Hi"))
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert statuses(free, chat("Hi")) == [200] * 6
        wait_until(lambda: statuses(few, chat("Hi")) == [200] * 6)
    url = f"{limited.cluster.url}/v1"
    limited.limit("few", "--max-prompt-tokens", "1")
    with openai.OpenAI(base_url=url, api_key=limited.keys["few"], max_retries=0) as client:
        with limited.client("few") as few:
            wait_until(lambda: statuses(few, chat("Hi")) == [429] * 6)
        with pytest.raises(openai.RateLimitError, match="send fewer tokens in one request"):
            client.chat.completions.create(**chat("Hi"))


def test_a_cached_prompt_comes_in_again_and_again_and_an_uncached_one_does_not(
    limited: Limited,
) -> None:
    with limited.client("minute") as client:

        def is_known_to_both() -> bool:
            """Asked for often enough to reach each router."""
            found = [client.post("/v1/route", json=known).json()["receipts"] for _ in range(6)]
            return all(
                max(receipt["hit_tokens"] for receipt in receipts[0]["replicas"]) > 300
                for receipts in found
            )

        known = chat("The parties agree to keep what follows to themselves. " * 40)
        first = client.post(CHATS, json=known)
        assert first.status_code == 200
        assert MINUTE / 2 < first.json()["usage"]["prompt_tokens"] < MINUTE
        wait_until(is_known_to_both)
        others = [chat(f"{number} is what nobody has asked yet. " * 50) for number in range(4)]
        refused = [client.post(CHATS, json=other) for other in others]
        assert [each.status_code for each in refused] == [429] * 4
        for each in refused:
            assert 1 <= int(each.headers["retry-after"]) <= 60
            assert each.headers["x-ratelimit-limit-tokens"] == f"{MINUTE}"
            assert "has cached do not count" in each.text
        assert statuses(client, known) == [200] * 6
