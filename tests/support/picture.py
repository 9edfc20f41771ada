"""A dashboard as a picture: its own queries, asked of a Prometheus and drawn without Grafana.

python -m tests.support.picture http://127.0.0.1:9090 cache-hits.png
"""

import re
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from matplotlib.figure import Figure

from dashboards.build import DASHBOARDS
from dashboards.grafana import COLUMNS, Dashboard, Panel, Query
from dashboards.promql import filled_in
from tests.support.charts import INK, PALE, Series, draw

POINTS = 240  # of a line
RATE_INTERVAL = "1m"  # Grafana's for the scrape interval in deploy/prometheus/prometheus.yml
WIDTH_IN, ROW_IN, DPI = 15.0, 0.33, 80  # a row of Grafana's grid
MARGINS_IN = (0.62, 0.15, 0.68, 0.42)  # left, right, bottom and top of a panel
HEAD_ROWS = 2  # of the grid, for the title


class Prometheus:
    """Answers queries about the last minutes before now."""

    def __init__(self, url: str, minutes: float) -> None:
        self._url = f"{url.rstrip('/')}/api/v1"
        self._end_s = time.time()
        self._range_s = round(60 * minutes)

    def series(self, panel: Panel) -> Iterator[Series]:
        """All that the panel shows. Raises HTTPError when a query is not answered."""
        for query in panel.queries:
            for found in self._ask(query.expr, is_instant=panel.is_instant):
                yield _series(query, found)

    def _ask(self, expr: str, *, is_instant: bool) -> list[dict[str, Any]]:
        asked: dict[str, Any] = {
            "query": filled_in(expr, rate_interval=RATE_INTERVAL, time_range=f"{self._range_s}s")
        }
        if is_instant:
            path, asked["time"] = "query", self._end_s
        else:
            path, asked["end"] = "query_range", self._end_s
            asked |= {"start": self._end_s - self._range_s, "step": self._range_s / POINTS}
        answer = httpx.get(f"{self._url}/{path}", params=asked, timeout=60).raise_for_status()
        result: list[dict[str, Any]] = answer.json()["data"]["result"]
        return result


def _series(query: Query, found: dict[str, Any]) -> Series:
    labels = found["metric"]
    name = re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), query.legend)
    points = found["values"] if "values" in found else [found["value"]]
    times = [datetime.fromtimestamp(float(at)) for at, _ in points]
    return Series(name, query.color, labels, times, [float(value) for _, value in points])


def picture(dashboard: Dashboard, prometheus: Prometheus) -> Figure:
    """All its panels where Grafana has them."""
    places = dashboard.to_json()["panels"]
    rows = HEAD_ROWS + max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in places)
    figure = Figure((WIDTH_IN, ROW_IN * rows), dpi=DPI, facecolor="white")
    head = {"y": 1 - 0.9 / rows, "va": "center"}
    figure.text(0.012, s=dashboard.title, size=15, weight="bold", color=INK, **head)
    figure.text(0.988, s=dashboard.description, size=10.5, ha="right", color=PALE, **head)
    panels = iter(panel for row in dashboard.rows for panel in row.panels)
    for place in places:
        x, y = place["gridPos"]["x"], place["gridPos"]["y"] + HEAD_ROWS
        if place["type"] == "row":
            top = 1 - (y + 0.6) / rows
            figure.text(0.012, top, place["title"], size=10.5, color=PALE, va="center")
        else:
            panel = next(panels)
            box = _box(x, y, place["gridPos"]["w"], place["gridPos"]["h"], rows)
            draw(figure.add_axes(box), panel, list(prometheus.series(panel)))
    return figure


def _box(x: int, y: int, width: int, height: int, rows: int) -> tuple[float, float, float, float]:
    """Left, bottom, width and height of a panel's axes, in shares of the picture."""
    left, right, bottom, top = MARGINS_IN
    whole = ROW_IN * rows
    low = whole - ROW_IN * (y + height) + (bottom if height > 5 else 0.1)
    high = whole - ROW_IN * y - top
    begin, end = WIDTH_IN * x / COLUMNS + left, WIDTH_IN * (x + width) / COLUMNS - right
    return begin / WIDTH_IN, low / whole, (end - begin) / WIDTH_IN, (high - low) / whole


def main(
    url: Annotated[str, typer.Argument(help="Of Prometheus.")],
    file: Annotated[Path, typer.Argument(help="Named like the dashboard: cache-hits.png.")],
    minutes: Annotated[float, typer.Option(help="Until now.")] = 10,
) -> None:
    """Draw a dashboard as Prometheus would fill it now."""
    by_name = {each.uid.removeprefix("kvroute-"): each for each in DASHBOARDS}
    if file.stem not in by_name:
        raise typer.BadParameter(f"{file.stem!r} is no dashboard; there are {', '.join(by_name)}")
    picture(by_name[file.stem], Prometheus(url, minutes)).savefig(file)


if __name__ == "__main__":
    typer.run(main)
