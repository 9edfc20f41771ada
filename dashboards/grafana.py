"""Generates Grafana's dashboard format from a short description of each dashboard.

Grafana has no waterfall chart. It is drawn as a stacked bar chart: each visible bar stands on an
invisible one, which has the colour `transparent`. Bars are sorted by the label `category`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dashboards.promql import quantile

Json = dict[str, Any]

SCHEMA_VERSION = 39  # the version of Grafana 11; newer versions of Grafana migrate it
COLUMNS = 24  # width of a dashboard in Grafana's grid
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

FRACTION, SECONDS, REQUESTS_PER_S, NUMBER, BYTES = "percentunit", "s", "reqps", "short", "bytes"
TOKENS_PER_S, BLOCKS_PER_S, TOKENS = "count:tokens/s", "count:blocks/s", "count:tokens"

Steps = Sequence[tuple[float | None, str]]  # (lowest value, colour of values from there on)
PLAIN: Steps = ((None, "blue"),)
BAD_BELOW_1: Steps = ((None, "red"), (1, "green"))
BAD_ABOVE_0: Steps = ((None, "green"), (1e-9, "red"))


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel."""

    expr: str  # in PromQL
    legend: str  # name of the line or bar
    color: str = ""  # empty: Grafana chooses the colour


def quantiles(buckets: str, *qs: float) -> tuple[Query, ...]:
    """Return queries for quantiles of a histogram's `..._bucket`; the legend of 0.5 is p50."""
    return tuple(Query(quantile(q, buckets), f"p{q * 100:.0f}") for q in qs)


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a dashboard."""

    title: str
    description: str  # what the panel shows, and what to do about bad values
    unit: str  # name of a unit of Grafana
    queries: Sequence[Query]
    kind: Literal["timeseries", "stat", "bargauge", "waterfall"] = "timeseries"
    stacking: Literal["none", "normal", "percent"] = "none"
    steps: Steps = PLAIN
    width: int = 8  # of COLUMNS columns

    @property
    def is_instant(self) -> bool:
        """Return whether the panel shows one moment, not a time range."""
        return self.kind in ("bargauge", "waterfall")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of panels with a heading."""

    title: str
    panels: Sequence[Panel]
    height: int = 8  # of each panel, in units of Grafana's grid


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]

    def queries(self) -> list[str]:
        """Return all Prometheus queries of the panels."""
        panels = (panel for row in self.rows for panel in row.panels)
        return [query.expr for panel in panels for query in panel.queries]

    def to_json(self) -> Json:
        """Return the dashboard in Grafana's format."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["kvroute"],
            "schemaVersion": SCHEMA_VERSION,
            "editable": True,
            "graphTooltip": 1,  # all panels show the cursor at the same time
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "links": [_LINKS],
            "templating": {"list": _variables()},
            "panels": [{"id": n} | panel for n, panel in enumerate(_laid_out(self.rows), 1)],
        }


_LINKS = {
    "type": "dashboards",
    "title": "kvroute",
    "tags": ["kvroute"],
    "asDropdown": False,
    "includeVars": True,
    "keepTime": True,
}


def _variables() -> list[Json]:
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        _variable(
            "model", "label_values(kvroute_replicas, model)", "Model name that clients send."
        ),
        _variable(
            "node",
            'label_values(kvroute_engine_block_tokens{model=~"$model"}, node)',
            "Node of the replicas. Panels with routers' metrics always show the whole fleet.",
        ),
        _variable(
            "replica",
            'label_values(kvroute_engine_block_tokens{model=~"$model", node=~"$node"}, replica)',
            "Panels with routers' metrics always show the whole fleet.",
        ),
    ]


def _variable(name: str, query: str, description: str) -> Json:
    return {
        "name": name,
        "label": name.capitalize(),
        "description": description,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # refresh when the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _laid_out(rows: Sequence[Row]) -> Iterator[Json]:
    """Return all panels in Grafana's format, with their places.

    Rows go from top to bottom. The panels of a row go from left to right, and continue below if
    they do not fit in COLUMNS.
    """
    y = 0
    for row in rows:
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        yield {
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": place,
        }
        x, y = 0, y + 1
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + row.height
            place = {"x": x, "y": y, "w": panel.width, "h": row.height}
            yield _panel(panel) | {"gridPos": place}
            x += panel.width
        y += row.height


def _panel(panel: Panel) -> Json:
    names = [chr(ord("A") + number) for number in range(len(panel.queries))]
    is_waterfall = panel.kind == "waterfall"
    return {
        "type": "barchart" if is_waterfall else panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "targets": [
            _target(query, name, is_instant=panel.is_instant)
            | {"format": "table" if is_waterfall else "time_series"}
            for query, name in zip(panel.queries, names, strict=True)
        ],
        "fieldConfig": {
            "defaults": _defaults(panel),
            "overrides": [
                _coloured(name, query, is_waterfall=is_waterfall)
                for query, name in zip(panel.queries, names, strict=True)
                if query.color
            ],
        },
        "transformations": _JOINED if is_waterfall else [],
        "options": _options(panel),
    }


_JOINED = [  # makes a table with a row for each category and a column for each query
    {"id": "joinByField", "options": {"byField": "category", "mode": "outer"}},
    {"id": "filterFieldsByName", "options": {"include": {"pattern": "^(category|Value.*)$"}}},
    {"id": "sortBy", "options": {"sort": [{"field": "category"}]}},
]


def _target(query: Query, name: str, *, is_instant: bool) -> Json:
    return {
        "refId": name,
        "datasource": SOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "instant": is_instant,
        "range": not is_instant,
    }


def _defaults(panel: Panel) -> Json:
    steps = [{"value": value, "color": color} for value, color in panel.steps]
    defaults = {
        "unit": panel.unit,
        "min": 0,
        "noValue": "none yet",
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.kind == "waterfall":
        return defaults | {"max": 1, "custom": {"fillOpacity": 90, "lineWidth": 0}}
    if panel.kind != "timeseries":
        return defaults | {"color": {"mode": "thresholds"}}
    is_stacked = panel.stacking != "none"
    custom = {
        "stacking": {"mode": panel.stacking, "group": "A"},
        "fillOpacity": 60 if is_stacked else 0,
        "lineWidth": 0 if is_stacked else 1,
        "showPoints": "never",
    }
    return defaults | {"color": {"mode": "palette-classic"}, "custom": custom}


def _coloured(name: str, query: Query, *, is_waterfall: bool) -> Json:
    matcher = {"id": "byFrameRefID", "options": name}
    properties: list[Json] = [
        {"id": "color", "value": {"mode": "fixed", "fixedColor": query.color}}
    ]
    if is_waterfall:  # the results are joined in one table, in which each query has a column
        matcher = {"id": "byName", "options": f"Value #{name}"}
        properties.append({"id": "displayName", "value": query.legend})
    if query.color == "transparent":
        hidden = {"legend": True, "tooltip": True, "viz": False}
        properties.append({"id": "custom.hideFrom", "value": hidden})
    return {"matcher": matcher, "properties": properties}


def _options(panel: Panel) -> Json:
    if panel.kind == "timeseries":
        return {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if panel.kind == "waterfall":
        return {
            "xField": "category",
            "stacking": "normal",
            "orientation": "vertical",
            "showValue": "never",
            "legend": {"showLegend": False},
            "tooltip": {"mode": "single"},
        }
    reduced = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    if panel.kind == "stat":
        return reduced | {"colorMode": "value", "graphMode": "area"}
    return reduced | {"displayMode": "basic", "orientation": "horizontal"}
