"""Every panel and every alert has something to show, and says what to do about it."""

import json
import re
import shutil
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from matplotlib.patches import Rectangle
from openai import OpenAI
from prometheus_client import REGISTRY, CollectorRegistry

from dashboards.build import DASHBOARDS, FOLDER, files
from dashboards.cache_hits import CACHE_HITS, LEDGER
from dashboards.picture import Prometheus as Asked
from dashboards.picture import picture
from dashboards.promql import filled_in
from replica.model import BUILTIN_MODEL
from router.routing.ledger import CAUSES
from tests import metrics_table
from tests.conftest import openai_client
from tests.prometheus_server import Prometheus, prometheus
from tests.serving import start_cluster

DEPLOY = FOLDER.parent / "deploy"
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
PANELS = [
    panel
    for dashboard in DASHBOARDS
    for panel in dashboard.to_json()["panels"]
    if panel["type"] != "row"
]
QUERIES = [query for dashboard in DASHBOARDS for query in dashboard.queries()]
NO_METRICS = {"and", "or", "unless", "bool"}

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs prometheus and promtool; on Debian: apt install prometheus",
)


def test_the_files_are_what_the_code_makes() -> None:
    made = {path.name: text for path, text in files().items()}
    found = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    assert found == made, "run python -m dashboards.build"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_nothing_on_a_dashboard_has_the_name_or_place_of_another(dashboard: Any) -> None:
    panels = dashboard.to_json()["panels"]
    titles = [panel["title"] for panel in panels]
    cells = Counter(cell for panel in panels for cell in _cells(**panel["gridPos"]))
    assert len(set(titles)) == len({panel["id"] for panel in panels}) == len(panels)
    assert set(cells.values()) == {1}
    assert max(x for x, _ in cells) < 24


def _cells(x: int, y: int, w: int, h: int) -> Iterator[tuple[int, int]]:
    return ((column, row) for column in range(x, x + w) for row in range(y, y + h))


def test_dashboards_are_told_apart() -> None:
    assert len({dashboard.uid for dashboard in DASHBOARDS}) == len(DASHBOARDS) == len(files())


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows_and_in_which_unit(panel: dict[str, Any]) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    assert unit in {"s", "percentunit", "reqps", "bytes", "short"} or unit.startswith("count:")
    assert len(re.findall(r"[.:] ", panel["description"])) >= 1, "what it is, then what to do"
    sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert {source["uid"] for source in sources} == {"${datasource}"}


def test_a_waterfall_stands_on_what_its_other_bars_add_up_to() -> None:
    (panel,) = (each for row in CACHE_HITS.rows for each in row.panels if each.kind == "waterfall")
    floor, *bars = panel.queries
    assert [bar.legend for bar in bars] == list(reversed(CAUSES))
    assert floor.color == "transparent"
    floors, *steps = (re.findall(r'"category", "([^"]+)"', query.expr) for query in panel.queries)
    places = list(chain.from_iterable(steps))
    assert places == sorted(places)
    assert sorted(floors) == places[:-1], "what is left stands on the ground"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_every_variable_of_a_query_is_on_its_dashboard(dashboard: Any) -> None:
    drawn = dashboard.to_json()
    offered = {variable["name"] for variable in drawn["templating"]["list"]}
    used = re.findall(r"\$\{?(\w+)", json.dumps(drawn["panels"]))
    assert {"model", "node", "replica", "datasource"} == offered
    assert {name for name in used if not name.startswith("__")} <= offered


def test_the_ledger_is_drawn_whole_and_in_its_order() -> None:
    assert tuple(cause for cause, _ in LEDGER) == CAUSES


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["for"]
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"].keys() == {"summary", "action"}
    assert rule["alert"] in (DEPLOY / "prometheus" / "alerts_test.yml").read_text()


@pytest.mark.parametrize("expression", [*QUERIES, *(rule["expr"] for rule in RULES)])
def test_what_is_asked_for_is_told(expression: str) -> None:
    """vLLM's own are compared with a running engine's, in test_vllm_cluster.py."""
    named = {name for name in metrics_in(expression) if not name.startswith("vllm:")}
    assert named <= told()


def metrics_in(expression: str) -> set[str]:
    """Their names: what is neither a label, a value, a duration, a function nor a keyword."""
    bare = re.sub(r"\{[^}]*\}|\"[^\"]*\"|\[[^\]]*\]|\b(by|on) \([^)]*\)", "", expression)
    return set(re.findall(r"(?<![\w:])[a-z][\w:]*\b(?!\s*\()", bare)) - NO_METRICS


def told() -> set[str]:
    """Names of all samples of a router and a replica, and the one that Prometheus adds."""
    registries = (metrics_table.router(), metrics_table.replica(), REGISTRY)
    return {"up"}.union(*map(_samples, registries))


def _samples(registry: CollectorRegistry) -> set[str]:
    return {sample.name for metric in registry.collect() for sample in metric.samples}


def test_grafana_is_told_where_prometheus_and_the_dashboards_are() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = _load(provisioning / "datasources" / "kvroute.yaml")["datasources"]
    (provider,) = _load(provisioning / "dashboards" / "kvroute.yaml")["providers"]
    assert source["type"] == "prometheus"
    assert (
        provider["options"]["path"].removeprefix("$") in (FOLDER.parent / "README.md").read_text()
    )


def _load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@needs_prometheus
@pytest.mark.parametrize(
    "check",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_finds_no_fault(check: tuple[str, ...]) -> None:
    command = ["promtool", *check]
    done = subprocess.run(command, cwd=DEPLOY / "prometheus", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, OpenAI]]:
    """A cluster and the Prometheus that reads from it."""
    options = ("--engine", "simulated", "--replicas", "2", "--routers", "2")
    log = ("--request-log", str(tmp_path_factory.mktemp("requests")))
    with (
        start_cluster(*options, *log) as cluster,
        prometheus(cluster) as server,
        openai_client(cluster) as client,
    ):
        prefix = {"id": "law", "prompt": "Name the law you rely on. " * 40}
        requests.post(f"{cluster.url}/v1/prefixes", json=prefix, timeout=30).raise_for_status()
        yield server, client


@needs_prometheus
@pytest.mark.timeout(300)
def test_every_panel_of_a_cluster_at_work_shows_something(
    watched: tuple[Prometheus, OpenAI],
) -> None:
    """But for vLLM's own metrics, which the simulated engine does not have."""
    server, client = watched
    blank = {query for query in QUERIES if "vllm:" not in query}
    deadline = time.monotonic() + 120
    while blank:
        assert time.monotonic() < deadline, blank
        work(client)
        blank = {query for query in blank if not _has_a_number(server, query)}
    assert not any(_has_a_number(server, query) for query in QUERIES if "vllm:" in query)


@needs_prometheus
@pytest.mark.timeout(300)
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


@needs_prometheus
@pytest.mark.timeout(300)
def test_a_picture_has_all_panels_and_a_waterfall_from_all_tokens_to_none(
    watched: tuple[Prometheus, OpenAI],
) -> None:
    server, client = watched
    titles = [panel.title for row in CACHE_HITS.rows for panel in row.panels]
    bars, deadline = list[Rectangle](), time.monotonic() + 120
    while not bars:
        assert time.monotonic() < deadline, "there is nothing to draw"
        work(client)
        time.sleep(1.1)  # Prometheus reads
        figure = picture(CACHE_HITS, Asked(server.url, minutes=1))
        assert [axes.get_title(loc="left") for axes in figure.axes] == titles
        axes = figure.axes[titles.index("From all prompt tokens down to those from a cache")]
        bars = [each for each in axes.patches if isinstance(each, Rectangle)]
    tops = [bar.get_y() + bar.get_height() for bar in bars]
    assert tops == pytest.approx([1, *(bar.get_y() for bar in bars[:-1])])
    assert bars[-1].get_y() == 0


def work(client: OpenAI) -> None:
    """Requests that begin alike and end differently."""
    for _ in range(4):
        prompt = "Room 42 seats 7. " * 40 + f"{uuid.uuid4()} " * 10
        client.completions.create(model=BUILTIN_MODEL, prompt=prompt)
    client.completions.create(model=BUILTIN_MODEL, prompt="May I?", extra_body={"prefix_id": "law"})


def _has_a_number(server: Prometheus, query: str) -> bool:
    return any(
        value == value
        for value in server.values(filled_in(query, rate_interval="10s", time_range="30s"))
    )  # NaN is not itself
