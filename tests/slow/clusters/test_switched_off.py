"""A cluster without all that can be switched off."""

import pytest
import requests
from openai import OpenAI
from typer.testing import CliRunner

from kvroute.cli import app
from tests.support.serving import Cluster
from tests.support.workloads import ask, people_table, user


@pytest.fixture
def cluster(plain: Cluster) -> Cluster:
    return plain


def test_without_prefix_caching_nothing_is_cached(cluster: Cluster, client: OpenAI) -> None:
    assert "reuse_cache: False" in cluster.output()
    answers = [ask(client, user(people_table())) for _ in range(4)]
    replicas = requests.get(f"{cluster.url}/v1/cluster", timeout=10).json()["replicas"]
    assert [answer.cached_tokens for answer in answers] == [0] * 4
    assert [(replica["block_size"], replica["blocks"]) for replica in replicas] == [(64, 0)] * 2


def test_without_metrics_there_are_no_targets(cluster: Cluster, client: OpenAI) -> None:
    ask(client, user("Hello"))
    assert requests.get(f"{cluster.url}/v1/metrics/targets", timeout=10).json() == []


def test_without_the_page_the_root_leads_to_the_list_of_routes(cluster: Cluster) -> None:
    answer = requests.get(cluster.url, timeout=10)
    assert (answer.status_code, answer.url) == (200, f"{cluster.url}/docs")


@pytest.mark.parametrize("path", ["/ui", "/ui/app.js", "/v1/cluster/live", "/v1/cluster/history"])
def test_without_the_page_it_is_said_how_to_have_it(cluster: Cluster, path: str) -> None:
    answer = requests.get(cluster.url + path, timeout=10)
    assert answer.status_code == 404
    assert "--ui" in answer.json()["error"]["message"]


def test_without_keys_it_is_said_how_to_have_accounts(cluster: Cluster) -> None:
    said = CliRunner().invoke(app, ["tenants", "--url", cluster.url])
    assert said.exit_code == 1
    assert "--api-keys" in said.output
