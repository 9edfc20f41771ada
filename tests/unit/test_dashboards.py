"""Every panel and every alert has something to show, and says what to do about it."""

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY, CollectorRegistry

from dashboards import cache_hits
from dashboards.build import DASHBOARDS, FOLDER, files
from dashboards.cache_hits import CACHE_HITS, LEDGER
from kvroute.contract.keep import EVICTION_REASONS
from kvroute.router.placement.ledger import CAUSES
from tests.support import metrics_table
from tests.support.documents import METRICS
from tests.support.untested import needs

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

needs_prometheus = needs("prometheus", "promtool")


def test_the_files_are_what_the_code_makes() -> None:
    made = {path.name: text for path, text in files().items()}
    found = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    assert found == made, "run python -m dashboards.build"


def test_no_panel_has_the_name_or_place_of_another_on_its_dashboard() -> None:
    for dashboard in DASHBOARDS:
        panels = dashboard.to_json()["panels"]
        titles = [panel["title"] for panel in panels]
        cells = Counter(cell for panel in panels for cell in _cells(**panel["gridPos"]))
        assert len(set(titles)) == len({panel["id"] for panel in panels}) == len(panels), titles
        assert [cell for cell, panels_there in cells.items() if panels_there > 1] == []
        assert max(x for x, _ in cells) < 24, dashboard.uid


def _cells(x: int, y: int, w: int, h: int) -> Iterator[tuple[int, int]]:
    return ((column, row) for column in range(x, x + w) for row in range(y, y + h))


def test_dashboards_are_told_apart() -> None:
    assert len({dashboard.uid for dashboard in DASHBOARDS}) == len(DASHBOARDS) == len(files())


def test_every_panel_says_what_it_shows_and_in_which_unit() -> None:
    assert [wrong for panel in PANELS for wrong in faults_of(panel)] == []


def faults_of(panel: dict[str, Any]) -> Iterator[str]:
    """Yield what a panel lacks, with its title."""
    title, unit = panel["title"], panel["fieldConfig"]["defaults"]["unit"]
    units = {"s", "percentunit", "reqps", "bytes", "short"}
    if unit not in units and not unit.startswith("count:"):
        yield f"{title}: {unit} is no unit of ours"
    if not re.search(r"[.:] ", panel["description"]):
        yield f"{title}: the description must say what it is, then what to do"
    sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    if {source["uid"] for source in sources} != {"${datasource}"}:
        yield f"{title}: its data must come from the dashboard's data source"


def test_a_waterfall_stands_on_what_its_other_bars_add_up_to() -> None:
    (panel,) = (each for row in CACHE_HITS.rows for each in row.panels if each.kind == "waterfall")
    floor, *bars = panel.queries
    assert [bar.legend for bar in bars] == list(reversed(CAUSES))
    assert floor.color == "transparent"
    floors, *steps = (re.findall(r'"category", "([^"]+)"', query.expr) for query in panel.queries)
    places = list(chain.from_iterable(steps))
    assert places == sorted(places)
    assert sorted(floors) == places[:-1], "what is left stands on the ground"


def test_every_variable_of_a_query_is_on_its_dashboard() -> None:
    for dashboard in DASHBOARDS:
        drawn = dashboard.to_json()
        offered = {variable["name"] for variable in drawn["templating"]["list"]}
        used = re.findall(r"\$\{?(\w+)", json.dumps(drawn["panels"]))
        assert {"model", "node", "replica", "datasource"} == offered, dashboard.uid
        assert {name for name in used if not name.startswith("__")} <= offered, dashboard.uid


def test_the_ledger_is_drawn_whole_and_in_its_order() -> None:
    assert tuple(cause for cause, _ in LEDGER) == CAUSES


def test_whatever_may_be_why_tokens_were_evicted_is_drawn() -> None:
    assert cache_hits.EVICTION_REASONS == EVICTION_REASONS


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    tests = (DEPLOY / "prometheus" / "alerts_test.yml").read_text()
    for rule in RULES:
        assert rule["for"], rule
        assert rule["labels"]["severity"] in {"critical", "warning"}, rule
        assert rule["annotations"].keys() == {"summary", "action"}, rule
        assert rule["alert"] in tests, rule


def test_every_metric_of_a_query_or_an_alert_is_exported() -> None:
    """vLLM's own metrics are compared with a running engine's, in test_vllm_cluster.py."""
    expressions, exported = [*QUERIES, *(rule["expr"] for rule in RULES)], names_exported()
    named = {name for expression in expressions for name in metrics_in(expression)}
    assert {name for name in named - exported if not name.startswith("vllm:")} == set()


def metrics_in(expression: str) -> set[str]:
    """Their names: what is neither a label, a value, a duration, a function nor a keyword."""
    bare = re.sub(r"\{[^}]*\}|\"[^\"]*\"|\[[^\]]*\]|\b(by|on) \([^)]*\)", "", expression)
    return set(re.findall(r"(?<![\w:])[a-z][\w:]*\b(?!\s*\()", bare)) - NO_METRICS


def names_exported() -> set[str]:
    """Return the names of all metrics of a router and a replica, and the one Prometheus adds."""
    registries = (metrics_table.router(), metrics_table.replica(), REGISTRY)
    return {"up"}.union(*map(_names, registries))


def _names(registry: CollectorRegistry) -> set[str]:
    names = set[str]()
    for metric in registry.collect():
        names |= {sample.name for sample in metric.samples}
        names.add(f"{metric.name}_total" if metric.type == "counter" else metric.name)
    return names


def test_grafana_is_told_where_prometheus_and_the_dashboards_are() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = _load(provisioning / "datasources" / "kvroute.yaml")["datasources"]
    (provider,) = _load(provisioning / "dashboards" / "kvroute.yaml")["providers"]
    assert source["type"] == "prometheus"
    assert provider["options"]["path"].removeprefix("$") in METRICS.read_text()


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
