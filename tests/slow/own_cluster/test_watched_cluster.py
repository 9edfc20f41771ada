"""Every panel and every alert has something to show of a cluster at work."""

import itertools
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
import yaml
from openai import OpenAI

from dashboards.build import DASHBOARDS, FOLDER
from dashboards.promql import filled_in
from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.clients import openai_client
from tests.support.prometheus_server import Prometheus, prometheus
from tests.support.serving import START_S, start_cluster

DEPLOY = FOLDER.parent / "deploy"
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
BLOCKS = 400  # of 32 tokens, of each replica
BURST = 16  # requests at once, so that both replicas are needed
BOOKS = itertools.cycle(range(60))  # together more than the caches hold
QUERIES = [query for dashboard in DASHBOARDS for query in dashboard.queries()]

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs prometheus and promtool; on Debian: apt install prometheus",
)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, OpenAI]]:
    """A cluster and the Prometheus that reads from it. Its caches are small, so `work` needs host
    memory, too."""
    options = ("--engine", "simulated", "--replicas", "2", "--routers", "2")
    caches = ("--simulated-blocks", f"{BLOCKS}", "--host-cache-gb", "2", "--pull", "on")
    others = ("--max-model-len", "5120", "--request-log", str(tmp_path_factory.mktemp("requests")))
    with (
        start_cluster(*options, *caches, *others) as cluster,
        prometheus(cluster) as server,
        openai_client(cluster) as client,
    ):
        prefix = {"id": "law", "prompt": "Name the law you rely on. " * 40}
        requests.post(f"{cluster.url}/v1/prefixes", json=prefix, timeout=30).raise_for_status()
        yield server, client


@needs_prometheus
def test_every_panel_of_a_cluster_at_work_shows_something(
    watched: tuple[Prometheus, OpenAI],
) -> None:
    """But for vLLM's own metrics, which the simulated engine does not have, for tenants', who need
    API keys (test_api_keys.py has some), and for waits and their forecasts: here no request has to
    wait (tests/unit/test_queue_seen.py)."""
    server, client = watched
    blank = {
        query
        for query in QUERIES
        if not re.search("vllm:|_tenant_|_(queue|seat)_wait|_queue_forecast", query)
    }
    deadline = time.monotonic() + START_S
    while blank:
        assert time.monotonic() < deadline, blank
        work(client)
        blank = {query for query in blank if not _has_a_number(server, query)}
    assert not any(_has_a_number(server, query) for query in QUERIES if "vllm:" in query)


@needs_prometheus
def test_every_alert_of_a_cluster_at_work_is_judged_and_none_fires(
    watched: tuple[Prometheus, OpenAI],
) -> None:
    """Its comparison has a result, 0 or 1, where it would otherwise be empty when all is well."""
    server, client = watched
    unjudged = {re.sub(r" (==|>) (?=[\d.]+\b(?!\)))", r" \1 bool ", rule["expr"]) for rule in RULES}
    deadline = time.monotonic() + 120
    while unjudged:
        assert time.monotonic() < deadline, unjudged
        work(client)
        unjudged = {expression for expression in unjudged if not server.values(expression)}
    (group,) = server.get("rules")["groups"]
    assert {rule["name"]: rule["health"] for rule in group["rules"]} == {
        rule["alert"]: "ok" for rule in RULES
    }
    assert "firing" not in {rule["state"] for rule in group["rules"]}


def work(client: OpenAI) -> None:
    """Send requests that begin alike and end differently, for what was evicted, and at once."""
    for _ in range(4):
        prompt = "Room 42 seats 7. " * 40 + f"{uuid.uuid4()} " * 10
        client.completions.create(model=BUILTIN_MODEL, prompt=prompt)
        book = [1000 + next(BOOKS)] * 600
        client.completions.create(model=BUILTIN_MODEL, prompt=book, max_tokens=2)
    client.completions.create(model=BUILTIN_MODEL, prompt="May I?", extra_body={"prefix_id": "law"})
    chapter = [2000 + next(BOOKS)] * 3200  # one replica has it, and the other one pulls it

    def ask(number: int) -> None:
        prompt = chapter + [3000 + number] * 1280
        client.completions.create(model=BUILTIN_MODEL, prompt=prompt, max_tokens=2)

    ask(0)
    with ThreadPoolExecutor(BURST) as threads:
        list(threads.map(ask, range(BURST)))


def _has_a_number(server: Prometheus, query: str) -> bool:
    return any(
        value == value
        for value in server.values(filled_in(query, rate_interval="10s", time_range="30s"))
    )  # NaN is not itself
