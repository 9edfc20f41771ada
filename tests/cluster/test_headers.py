"""Headers that Ray Serve would obey or fail at, through a whole cluster."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.router.api.sessions import AGENTS, SESSION
from tests.support.json_lines import read_lines
from tests.support.serving import Cluster
from tests.support.waiting import wait_until
from tests.support.workloads import user

CHAT: dict[str, Any] = {"model": BUILTIN_MODEL, "messages": user("Hello there"), "max_tokens": 8}
HEADERS = (
    *("x-request-timeout-seconds", "x-request-disconnect-disabled", "x-serve-router-a"),
    *("serve_multiplexed_model_id", "serve-multiplexed-model-id", "x_session_id", "x-request-id"),
    *("traceparent", "tracestate", "authorization", "x-api-key", "accept", "user-agent", "cookie"),
    *("x-kvroute-prefix", "x-kvroute-priority", "x-kvroute-deadline-s", "x-kvroute-receipt"),
    *(SESSION, *AGENTS, "anthropic-version", "x-anything"),
)


@pytest.mark.parametrize("name", HEADERS)
def test_a_value_that_is_not_utf8_breaks_no_route(cluster: Cluster, name: str) -> None:
    bad = {name.encode(): b"caf\xe9"}
    with httpx.Client(base_url=cluster.url, headers=bad, timeout=60) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 200
        answer = client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code in (200, 400, 404), answer.text
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("stream", [False, True])
def test_clients_do_not_set_serves_time_limit(cluster: Cluster, stream: bool) -> None:
    short = {"x-request-timeout-seconds": "0.01"}
    body = CHAT | {"stream": stream, "max_tokens": 50, "ignore_eos": True}
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, headers=short, timeout=60)
    assert answer.status_code == 200
    assert "[DONE]" in answer.text or answer.json()["usage"]["completion_tokens"] == 50


def test_what_a_client_leaves_is_ended_whatever_its_headers_say(
    cluster: Cluster, request_log: Path
) -> None:
    body = CHAT | {"stream": True, "max_tokens": 4000, "ignore_eos": True}
    stay = {"x-request-disconnect-disabled": "?1", "x-request-id": "left"}
    url = f"{cluster.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=stay, timeout=60) as response:
        next(response.iter_lines())
    wait_until(lambda: outcomes(request_log, "left"))
    assert outcomes(request_log, "left") == ["cancelled"]


def outcomes(log: Path, request_id: str) -> list[str]:
    lines = read_lines(sorted(log.glob("*.jsonl")))
    return [line["outcome"] for line in lines if line["request_id"] == request_id]
